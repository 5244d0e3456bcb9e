//! Parser or engine? How the forms of the same dictated turns agree over an arm.
//!
//! A fault that strikes at random, such as a race, breaks each form as often as the other; a parser breaks its own. So what
//! counts is how uneven the disagreement is: the exact sign test over sessions, each on the side on which more of its
//! turns broke.

use std::{cmp::Ordering, collections::BTreeMap};

use serde::{Deserialize, Serialize};

use crate::{
    stats::exact,
    validate::{
        Class,
        parity::{Form, Forms, Suspect},
    },
};

/// In which of two forms turns broke.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Split {
    /// In the stream only.
    pub streamed_only: u64,
    /// In the document only.
    pub unary_only: u64,
    /// In both.
    pub both: u64,
}

/// The turns of an arm that were asked in several forms.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Parity {
    /// Turns that could be judged both as a stream and as a document.
    pub compared: u64,
    /// How they broke.
    pub broken: Split,
    /// The same, class by class: a turn that broke under two names is one in each.
    pub classes: BTreeMap<Class, Split>,
    /// Sessions in which more turns broke as a stream, and as a document.
    pub sessions: [u64; 2],
    /// How likely so uneven a disagreement is when no form breaks more often; null where none disagrees.
    pub p_value: Option<f64>,
    /// Turns that could be judged both as a document and as raw text; 0 where the server offers no raw text.
    pub raw_compared: u64,
    /// Of these, broken in the document only, and in the raw text only.
    pub raw_disagree: [u64; 2],
    /// Further answers of which nothing can be said, by class.
    pub unjudged: BTreeMap<Class, u64>,
    /// Turn by turn, whom it points at.
    pub suspects: BTreeMap<Suspect, u64>,
    /// Whom all of them point at.
    pub suspect: Suspect,
    /// The sentence for people.
    pub conclusion: String,
}

impl Parity {
    /// Counts the turns of each session.
    pub fn of<'a>(sessions: impl Iterator<Item = &'a [Forms]>, confidence: f64) -> Self {
        let mut sum = Self {
            compared: 0,
            broken: Split::default(),
            classes: BTreeMap::new(),
            sessions: [0; 2],
            p_value: None,
            raw_compared: 0,
            raw_disagree: [0; 2],
            unjudged: BTreeMap::new(),
            suspects: BTreeMap::new(),
            suspect: Suspect::Unknown,
            conclusion: String::new(),
        };
        let mut raw_sessions = [0; 2];
        for turns in sessions {
            let (mut parsed, mut raw) = ([0; 2], [0; 2]);
            for forms in turns {
                sum.add(forms, &mut parsed, &mut raw);
            }
            lean(&mut sum.sessions, parsed);
            lean(&mut raw_sessions, raw);
            sum.raw_disagree = [sum.raw_disagree[0] + raw[0], sum.raw_disagree[1] + raw[1]];
        }
        let [streamed, unary] = sum.sessions;
        sum.p_value = (streamed + unary > 0).then(|| exact::sign(streamed, unary));
        sum.suspect = sum.conclude(raw_sessions, 1.0 - confidence);
        sum.conclusion = sum.sentence();
        sum
    }

    fn add(&mut self, forms: &Forms, parsed: &mut [u64; 2], raw: &mut [u64; 2]) {
        *self.suspects.entry(forms.suspect()).or_default() += 1;
        for heard in forms.0.values().filter(|heard| heard.is_broken().is_none()) {
            *self.unjudged.entry(heard.class).or_default() += 1;
        }
        let broken = |form| forms.is_broken(form);
        if let (Some(unary), Some(text)) = (broken(Form::Unary), broken(Form::Raw)) {
            self.raw_compared += 1;
            *raw = [raw[0] + u64::from(unary && !text), raw[1] + u64::from(text && !unary)];
        }
        let (Some(streamed), Some(unary)) = (broken(Form::Streamed), broken(Form::Unary)) else { return };
        self.compared += 1;
        self.broken.add(streamed, unary);
        *parsed = [parsed[0] + u64::from(streamed && !unary), parsed[1] + u64::from(unary && !streamed)];
        let class = |form, broken: bool| if broken { forms.0.get(&form).map(|heard| heard.class) } else { None };
        let (streamed, unary) = (class(Form::Streamed, streamed), class(Form::Unary, unary));
        for found in streamed.into_iter().chain(unary.filter(|unary| streamed != Some(*unary))) {
            self.classes.entry(found).or_default().add(streamed == Some(found), unary == Some(found));
        }
    }

    fn conclude(&self, raw: [u64; 2], alpha: f64) -> Suspect {
        let uneven = |[first, second]: [u64; 2]| {
            if exact::sign(first, second) < alpha { first.cmp(&second) } else { Ordering::Equal }
        };
        let Split { both, streamed_only, unary_only } = self.broken;
        match (uneven(self.sessions), uneven(raw)) {
            (Ordering::Less, _) => Suspect::UnaryParser,
            (_, Ordering::Greater) => Suspect::Parser,
            (Ordering::Greater, _) => Suspect::StreamParser,
            _ if self.compared == 0 => Suspect::Unknown,
            _ if both + streamed_only + unary_only == 0 => Suspect::Nobody,
            _ if both == 0 && exact::sign(0, self.sessions.iter().sum()) >= alpha => Suspect::Unknown,
            _ => Suspect::Engine,
        }
    }

    fn sentence(&self) -> String {
        let text = match self.suspect {
            Suspect::Nobody => "the forms agree and are intact",
            Suspect::StreamParser => "calls break as a stream: suspect the server's stream parser, not the engine",
            Suspect::UnaryParser => "calls break as a document: suspect the server's parser of whole answers",
            Suspect::Parser => "calls break once parsed and are intact as raw text: suspect the server's parser",
            Suspect::Engine if self.raw_compared > 0 => {
                "no form breaks more often than another: suspect the engine or the model, not a parser"
            }
            Suspect::Engine => {
                "neither form breaks more often: suspect the engine, the model, or what both parsers share"
            }
            Suspect::Unknown if self.compared == 0 => "no turn could be judged in both forms",
            Suspect::Unknown => "too few turns broke to tell the parser from the engine",
        };
        text.to_owned()
    }

    /// What a person reads: the conclusion, and the classes behind it.
    pub fn lines(&self) -> Vec<String> {
        let p = self.p_value.map_or_else(String::new, |p| format!(", p = {p:.3}"));
        let mut lines = vec![
            format!("parity: {}", self.conclusion),
            format!("parity: {} turns in both forms, {}{p}", self.compared, self.broken),
        ];
        lines.extend(self.classes.iter().map(|(class, split)| format!("parity: {class}: {split}")));
        if self.raw_compared > 0 {
            let [unary, raw] = self.raw_disagree;
            let compared = self.raw_compared;
            lines.push(format!("parity: {compared} turns as raw text, {unary} broken only parsed, {raw} only raw"));
        }
        lines.extend(self.unjudged.iter().map(|(class, count)| format!("parity: {count} {class} (not compared)")));
        lines
    }
}

impl Split {
    fn add(&mut self, streamed: bool, unary: bool) {
        match (streamed, unary) {
            (true, true) => self.both += 1,
            (true, false) => self.streamed_only += 1,
            (false, true) => self.unary_only += 1,
            (false, false) => {}
        }
    }
}

impl std::fmt::Display for Split {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { streamed_only, unary_only, both } = self;
        write!(f, "{streamed_only} broken only streamed, {unary_only} only unary, {both} in both")
    }
}

/// Counts a session on the side on which more of its turns broke.
fn lean(sessions: &mut [u64; 2], turns: [u64; 2]) {
    match turns[0].cmp(&turns[1]) {
        Ordering::Greater => sessions[0] += 1,
        Ordering::Less => sessions[1] += 1,
        Ordering::Equal => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::validate::{Verdict, parity::Heard};

    /// Sessions of one turn; `x` is broken, `o` intact, `-` lost; streamed, unary and, if given, raw.
    fn parity(turns: &[(&str, u64)]) -> Parity {
        let one = |text: &str| {
            let mut forms = Forms::default();
            for (form, letter) in [Form::Streamed, Form::Unary, Form::Raw].into_iter().zip(text.chars()) {
                forms.add(
                    form,
                    match letter {
                        'x' => Heard { verdict: Verdict::Corrupted, class: Class::ArgsTruncated },
                        'o' => Heard { verdict: Verdict::Valid, class: Class::Ok },
                        _ => Heard { verdict: Verdict::Refused, class: Class::ServerRefused },
                    },
                );
            }
            vec![forms]
        };
        let sessions: Vec<_> = turns.iter().flat_map(|(text, times)| (0..*times).map(move |_| one(text))).collect();
        Parity::of(sessions.iter().map(Vec::as_slice), 0.95)
    }

    #[test]
    fn a_form_is_suspected_when_it_breaks_more_often_than_chance_explains() {
        for (turns, suspect) in [
            (&[("oo", 90)][..], Suspect::Nobody),
            (&[("oo", 40), ("xo", 6)], Suspect::StreamParser),
            (&[("oo", 40), ("ox", 7), ("xo", 0)], Suspect::UnaryParser),
            (&[("oo", 40), ("xo", 5)], Suspect::Unknown),
            (&[("oo", 40), ("xo", 12), ("ox", 9)], Suspect::Engine),
            (&[("oo", 40), ("xx", 2)], Suspect::Engine),
            (&[("ooo", 40), ("xxo", 9)], Suspect::Parser),
            (&[("ooo", 40), ("xoo", 6), ("oxo", 5), ("oox", 7)], Suspect::Engine),
            (&[("o-", 9)], Suspect::Unknown),
        ] {
            let parity = parity(turns);
            assert_eq!(parity.suspect, suspect, "{turns:?}: {parity:?}");
        }
    }

    #[test]
    fn every_answer_is_counted_once() {
        let parity = parity(&[("oo", 3), ("xo", 2), ("xx", 1), ("o-", 4)]);
        assert_eq!((parity.compared, parity.unjudged[&Class::ServerRefused]), (6, 4));
        assert_eq!(parity.classes[&Class::ArgsTruncated], Split { streamed_only: 2, unary_only: 0, both: 1 });
        assert_eq!(parity.broken, parity.classes[&Class::ArgsTruncated]);
        assert!(parity.lines()[1].contains("2 broken only streamed, 0 only unary, 1 in both, p = 0.500"));
    }
}
