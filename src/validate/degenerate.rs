//! Text that a broken model state writes: loops, floods, token soup, words of mixed scripts.

/// Verbatim repeats from which a loop is called one.
const REPEATS: usize = 8;

/// Degenerate text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding<'a> {
    /// The stretch that shows it.
    pub stretch: &'a str,
    /// Why, in one sentence.
    pub detail: String,
}

/// The first degenerate stretch of a text. Linear in the length of the text, but for a logarithm.
pub fn find(text: &str, lone_words: bool) -> Option<Finding<'_>> {
    find_loop(text, REPEATS).or_else(|| find_scripts(text, lone_words))
}

/// A unit repeated verbatim at least `repeats` times.
pub fn find_loop(text: &str, repeats: usize) -> Option<Finding<'_>> {
    let bytes = text.as_bytes();
    let mut scale = 1;
    let mut border = Vec::new();
    while scale * REPEATS <= bytes.len() {
        let window = 4 * scale;
        let mut start = 0;
        while start + window <= bytes.len() {
            let period = smallest_period(&bytes[start..start + window], &mut border);
            if period * 2 > window {
                start += window;
                continue;
            }
            let run = Run::around(bytes, start, period);
            if run.is_loop(text, repeats) {
                return Some(run.describe(text));
            }
            start = (start + window).max((run.end + 1).saturating_sub(window));
        }
        scale *= 2;
    }
    None
}

/// Smallest period of a window, by the prefix function, for which `border` is the reused room.
fn smallest_period(window: &[u8], border: &mut Vec<usize>) -> usize {
    border.clear();
    border.resize(window.len(), 0);
    for at in 1..window.len() {
        let mut length = border[at - 1];
        while length > 0 && window[at] != window[length] {
            length = border[length - 1];
        }
        border[at] = length + usize::from(window[at] == window[length]);
    }
    window.len() - border[window.len() - 1]
}

/// A stretch of text in which every byte equals the one `period` before.
#[derive(Debug, Clone, Copy)]
struct Run {
    start: usize,
    end: usize,
    period: usize,
}

impl Run {
    fn around(bytes: &[u8], at: usize, period: usize) -> Self {
        let mut end = at + period;
        while end < bytes.len() && bytes[end] == bytes[end - period] {
            end += 1;
        }
        let mut start = at;
        while start > 0 && bytes[start - 1] == bytes[start - 1 + period] {
            start -= 1;
        }
        Self { start, end, period }
    }

    /// Floods of rulers, zeros and white space are ordinary up to a length; words are not.
    fn is_loop(self, text: &str, repeats: usize) -> bool {
        let length = self.end - self.start;
        let count = length / self.period;
        let unit = self.unit(text);
        let mut characters = unit.chars();
        let (Some(first), second) = (characters.next(), characters.next()) else { return false };
        if count < repeats || unit.contains(char::REPLACEMENT_CHARACTER) {
            return false;
        }
        if unit.trim().is_empty() {
            return if unit.contains('\n') { count >= 2 * repeats } else { length >= 512 };
        }
        if second.is_none() {
            return match first {
                '!' => true,
                '?' | '@' | '$' | '%' | '&' => count >= 2 * repeats,
                _ if first.is_ascii_alphabetic() => count >= 3 * repeats,
                _ if first.is_alphabetic() => count >= repeats + 4,
                _ if first.is_ascii() || is_ruler(first) => count >= 32 * repeats,
                _ => count >= 8 * repeats,
            };
        }
        if unit.chars().any(char::is_alphabetic) {
            length >= 2 * repeats
        } else {
            count >= 4 * repeats && length >= 256
        }
    }

    /// The repeated unit, from the first whole character on.
    fn unit(self, text: &str) -> &str {
        let start = (self.start..self.end).find(|&at| text.is_char_boundary(at)).unwrap_or(self.end);
        let end = (start + self.period).min(self.end);
        text.get(start..end).unwrap_or_default()
    }

    fn describe(self, text: &str) -> Finding<'_> {
        let unit: String = self.unit(text).chars().take(40).collect();
        let count = (self.end - self.start) / self.period;
        let start = (self.start..self.end).find(|&at| text.is_char_boundary(at)).unwrap_or(self.end);
        let end = (start..=self.end).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(start);
        Finding { stretch: &text[start..end], detail: format!("{unit:?} repeats {count} times from byte {start}") }
    }
}

/// Characters of which people draw lines.
fn is_ruler(character: char) -> bool {
    matches!(character, '–' | '—' | '…' | '·' | '•' | '─'..='◿' | '＝' | '－' | '＊')
}

/// White space outside strings that goes on without end.
pub fn find_blank_loop(json: &str) -> Option<String> {
    let mut breaks = 0;
    let mut tabs = 0;
    let mut blanks = 0;
    for (at, byte) in json.bytes().enumerate() {
        match byte {
            b'\n' | b'\r' => breaks += 1,
            b'\t' => tabs += 1,
            b' ' => blanks += 1,
            _ => (breaks, tabs, blanks) = (0, 0, 0),
        }
        if breaks >= REPEATS || tabs >= 64 || blanks >= 512 {
            return Some(format!("white space without end up to byte {at}"));
        }
    }
    None
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Script {
    Latin,
    Greek,
    Cyrillic,
    Armenian,
    Hebrew,
    Arabic,
    Indic,
    Thai,
    Georgian,
    Hangul,
    Kana,
    Han,
}

fn script(character: char) -> Option<Script> {
    Some(match u32::from(character) {
        0x41..=0x5A | 0x61..=0x7A | 0xAA | 0xBA | 0xC0..=0xD6 | 0xD8..=0xF6 | 0xF8..=0x24F | 0x1E00..=0x1EFF => {
            Script::Latin
        }
        0x370..=0x3FF | 0x1F00..=0x1FFF if character.is_alphabetic() => Script::Greek,
        0x400..=0x52F => Script::Cyrillic,
        0x530..=0x58F => Script::Armenian,
        0x590..=0x5FF => Script::Hebrew,
        0x600..=0x6FF | 0x750..=0x77F => Script::Arabic,
        0x900..=0xDFF => Script::Indic,
        0xE00..=0xE7F => Script::Thai,
        0x10A0..=0x10FF => Script::Georgian,
        0x1100..=0x11FF | 0xAC00..=0xD7AF => Script::Hangul,
        0x3040..=0x30FF => Script::Kana,
        0x3400..=0x4DBF | 0x4E00..=0x9FFF | 0xF900..=0xFAFF => Script::Han,
        _ => return None,
    })
}

/// Words that mix alphabets. `lone_words`: one such word is enough, as in an argument.
fn find_scripts(text: &str, lone_words: bool) -> Option<Finding<'_>> {
    if text.is_ascii() {
        return None;
    }
    let mut scripts = std::collections::BTreeSet::new();
    let mut mixed = 0;
    let mut impossible = Vec::new();
    for word in text.split(|character: char| script(character).is_none()).filter(|word| !word.is_empty()) {
        let here: std::collections::BTreeSet<Script> = word.chars().filter_map(script).collect();
        mixed += usize::from(here.len() > 1);
        if is_impossible(word) {
            impossible.push(word);
        }
        scripts.extend(here);
    }
    if scripts.len() >= 4 && mixed >= 3 {
        let detail = format!("token soup: {} scripts, {mixed} words of mixed script", scripts.len());
        return Some(Finding { stretch: text, detail });
    }
    let enough = impossible.len() >= if lone_words { 1 } else { 2 };
    let word = impossible.first().filter(|_| enough)?;
    Some(Finding { stretch: word, detail: format!("the word {word:?} mixes alphabets") })
}

/// Alphabets that no language writes in one word. Greek letters beside a Latin unit or symbol do occur.
fn is_impossible(word: &str) -> bool {
    let count = |wanted| word.chars().filter(|&character| script(character) == Some(wanted)).count();
    let (latin, greek, cyrillic) = (count(Script::Latin), count(Script::Greek), count(Script::Cyrillic));
    let long = word.chars().count() >= 4;
    (long && latin > 0 && cyrillic > 0)
        || (latin >= 2 && greek >= 2)
        || (cyrillic >= 2 && greek >= 2)
        || (count(Script::Armenian) >= 2 && latin + cyrillic >= 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_are_found_wherever_they_stand() {
        for text in [
            "!!!!!!!!!!",
            "Plan: keep the VTTVTTVTTVTTVTTVTTVTTVTTVTTVTT file.",
            &format!("Well. {}", "I will check the weather now. ".repeat(9)),
            &format!("x{}y", "的确".repeat(12)),
            &"好".repeat(20),
            &"\n".repeat(40),
            &format!("prose of no interest, quite long. {}", "ab ".repeat(8)),
        ] {
            assert!(find(text, false).is_some(), "{text}");
        }
    }

    #[test]
    fn ordinary_repetition_is_no_loop() {
        for text in [
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
            "----------------------------------------------------",
            "0x0000000000000000000000000000000000000000000000000000000000000000",
            "                                deep indentation",
            "ha ha ha ha",
            "Wow!!!",
            "0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0",
            "The quick brown fox jumps over the lazy dog.",
            "5 μm, 3 kΩ, Δt",
            "T恤 and Wi-Fi网络, API를 쓴다",
            "Привет, Lyon! Γειά σου.",
        ] {
            assert_eq!(find(text, true), None, "{text}");
        }
    }

    #[test]
    fn one_repeat_fewer_is_no_loop() {
        assert!(find_loop(&"VTT".repeat(8), 8).is_some());
        assert!(find_loop(&"VTT".repeat(7), 8).is_none());
        assert!(find_loop(&"!".repeat(8), 8).is_some());
        assert!(find_loop(&"!".repeat(7), 8).is_none());
    }

    #[test]
    fn every_run_of_eight_is_found_at_every_offset() {
        for period in 2..40 {
            let unit: String = (0..period).map(|at| char::from(b'a' + (at * at % 23) as u8)).chain(['Z']).collect();
            for offset in 0..35 {
                let lead: String = (0..offset).map(|at| char::from(b'0' + (at * 7 % 10) as u8)).collect();
                let text = format!("{lead}{}", unit.repeat(8));
                assert!(find_loop(&text, 8).is_some(), "period {} at {offset}", unit.len());
            }
        }
    }
}
