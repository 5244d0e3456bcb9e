//! Parser or engine? The same dictated call judged in several forms: streamed, unary, raw text.
//!
//! What is broken in one form only was broken by the code that makes that form. What is broken in all of them was broken
//! before: by the engine, or by the model.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Class, Judgement, Verdict};

/// A form in which the same answer was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// Parsed, as a stream.
    Streamed,
    /// Parsed, as one document.
    Unary,
    /// The text before any parser, judged against the dictated text.
    Raw,
}

/// Where the disagreement of the forms points.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Suspect {
    /// Every form is intact.
    Nobody,
    /// Broken only in the stream: the incremental parser.
    StreamParser,
    /// Broken only in the document: the parser of whole answers.
    UnaryParser,
    /// Broken in every parsed form, intact in the raw text.
    Parser,
    /// Broken in every form that was asked.
    Engine,
    /// Too few forms could be judged.
    Unknown,
}

/// The judgements of one dictated call, by form.
#[derive(Debug, Clone, Default)]
pub struct Forms(BTreeMap<Form, (Verdict, Class)>);

impl Forms {
    /// Adds a form. Answers of which nothing can be said, such as refused ones, are left out.
    pub fn add(&mut self, form: Form, judgement: &Judgement) {
        if matches!(judgement.verdict, Verdict::Valid | Verdict::Corrupted) {
            self.0.insert(form, (judgement.verdict, judgement.class));
        }
    }

    fn is_broken(&self, form: Form) -> Option<bool> {
        self.0.get(&form).map(|(verdict, _)| *verdict == Verdict::Corrupted)
    }

    /// Whom the disagreement points at.
    pub fn suspect(&self) -> Suspect {
        let broken = |form| self.is_broken(form);
        match (broken(Form::Streamed), broken(Form::Unary), broken(Form::Raw)) {
            (None, None, _) => Suspect::Unknown,
            (streamed, unary, Some(false)) if streamed != Some(false) && unary != Some(false) => Suspect::Parser,
            (Some(true), Some(false), _) => Suspect::StreamParser,
            (Some(false), Some(true), _) => Suspect::UnaryParser,
            (Some(false), _, Some(false)) | (_, Some(false), Some(false)) | (Some(false), Some(false), None) => {
                Suspect::Nobody
            }
            (Some(true), Some(true), _) | (Some(true), None, Some(true)) | (None, Some(true), Some(true)) => {
                Suspect::Engine
            }
            _ => Suspect::Unknown,
        }
    }
}

/// How the forms of many calls agree.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Report {
    /// Dictated calls compared.
    pub compared: u64,
    /// How many point at whom.
    pub suspects: BTreeMap<Suspect, u64>,
    /// Per class, how often it occurred in one form only and in which.
    pub disagreements: BTreeMap<Class, BTreeMap<Form, u64>>,
}

impl Report {
    /// Counts one dictated call.
    pub fn add(&mut self, forms: &Forms) {
        self.compared += 1;
        *self.suspects.entry(forms.suspect()).or_default() += 1;
        for (form, (verdict, class)) in &forms.0 {
            let alone = !forms.0.iter().any(|(other, (_, found))| other != form && found == class);
            if *verdict == Verdict::Corrupted && forms.0.len() > 1 && alone {
                *self.disagreements.entry(*class).or_default().entry(*form).or_default() += 1;
            }
        }
    }

    /// The sentence for people.
    pub fn conclusion(&self) -> &'static str {
        let count = |suspect| self.suspects.get(&suspect).copied().unwrap_or(0);
        let parser = count(Suspect::StreamParser) + count(Suspect::UnaryParser) + count(Suspect::Parser);
        match (parser, count(Suspect::Engine)) {
            (0, 0) => "the forms agree and are intact",
            (0, _) => "calls are broken alike in every form: the engine or the model, not the parser",
            (_, 0) => "calls are broken in some forms only: the server's parser, not the engine",
            (_, _) => "calls are broken in some forms only and in every form: both the parser and the engine",
        }
    }
}
