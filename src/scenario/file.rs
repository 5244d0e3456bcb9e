//! TOML to scenario and matrix: unknown keys are errors that name file, line, key and the nearest known key.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::de::DeserializeOwned;

use super::{Matrix, Scenario};
use crate::error::{Error, Result};

/// The files that travel inside the binary, by name.
const SHIPPED: &[(&str, &str)] = &[
    ("agentic", include_str!("../../scenarios/agentic.toml")),
    ("quick", include_str!("../../scenarios/quick.toml")),
    ("gate", include_str!("../../scenarios/gate.toml")),
    ("seed-table", include_str!("../../scenarios/seed-table.toml")),
    ("adversarial", include_str!("../../scenarios/adversarial.toml")),
    ("recall", include_str!("../../scenarios/recall.toml")),
    ("long-context", include_str!("../../scenarios/long-context.toml")),
    ("bisect-overlap", include_str!("../../scenarios/bisect-overlap.toml")),
    ("bisect-interaction", include_str!("../../scenarios/bisect-interaction.toml")),
    ("sglang", include_str!("../../scenarios/sglang.toml")),
    ("vllm", include_str!("../../scenarios/vllm.toml")),
    ("trtllm", include_str!("../../scenarios/trtllm.toml")),
    ("two-servers", include_str!("../../scenarios/two-servers.toml")),
    ("sglang-0.5.18-vs-0.5.19", include_str!("../../scenarios/sglang-0.5.18-vs-0.5.19.toml")),
];

/// Sessions of an arm at most: more are not kept in memory.
pub const MOST_SESSIONS: u64 = 10_000_000;

/// The matrix at the path `wanted`, or the shipped one of that name, with its scenario.
pub fn matrix(wanted: &str) -> Result<(Matrix, Scenario)> {
    let (text, path) = find(wanted, None)?;
    let matrix: Matrix = parse(&text, &path).map_err(|error| {
        let other = toml::from_str::<Scenario>(&text).is_ok();
        if other { mistaken(wanted, "a scenario and no matrix", "run") } else { error }
    })?;
    matrix.check().map_err(|error| error.within(path.display()))?;
    let scenario = scenario_near(&matrix.scenario, path.parent())?;
    Ok((matrix, scenario))
}

/// The scenario at the path `wanted`, or the shipped one of that name.
pub fn scenario(wanted: &str) -> Result<Scenario> {
    scenario_near(wanted, None)
}

/// A matrix of one arm with the environment `env` around `scenario`, everything else at its default.
pub fn around(scenario: &Scenario, env: BTreeMap<String, String>) -> Result<Matrix> {
    let text = "name = \"run\"\nscenario = \"run\"";
    let matrix: Matrix = parse(text, Path::new("run"))?;
    Ok(Matrix { name: scenario.name.clone(), scenario: scenario.name.clone(), env, ..matrix })
}

fn scenario_near(wanted: &str, folder: Option<&Path>) -> Result<Scenario> {
    let (text, path) = find(wanted, folder)?;
    let scenario: Scenario = parse(&text, &path).map_err(|error| {
        let other = toml::from_str::<Matrix>(&text).is_ok();
        if other { mistaken(wanted, "a matrix and no scenario", "matrix") } else { error }
    })?;
    scenario.check().map_err(|error| error.within(path.display()))?;
    Ok(scenario)
}

fn mistaken(wanted: &str, what: &str, command: &str) -> Error {
    Error::usage(format!("{wanted} is {what}")).hint(format!("use `toolstorm {command} {wanted}`"))
}

/// A path from here, a path or a bare name from `folder`, or a shipped name; in this order.
fn find(wanted: &str, folder: Option<&Path>) -> Result<(String, PathBuf)> {
    let beside = folder.map(|folder| folder.join(wanted));
    let named = folder.map(|folder| folder.join(format!("{wanted}.toml")));
    for path in [beside, named, Some(PathBuf::from(wanted))].into_iter().flatten() {
        if path.is_file() {
            let text = std::fs::read_to_string(&path)
                .map_err(|error| Error::usage(format!("cannot read {}: {error}", path.display())))?;
            return Ok((text, path));
        }
    }
    if let Some((name, text)) = SHIPPED.iter().find(|(name, _)| *name == wanted) {
        return Ok(((*text).to_owned(), PathBuf::from(format!("{name}.toml"))));
    }
    let names: Vec<_> = SHIPPED.iter().map(|(name, _)| *name).collect();
    Err(Error::usage(format!("no such file: {wanted}")).hint(format!("give a path, or one of: {}", names.join(", "))))
}

/// Reads `text`, which came from `path`.
fn parse<T: DeserializeOwned>(text: &str, path: &Path) -> Result<T> {
    toml::from_str(text).map_err(|error| explain(&error, text, path))
}

fn explain(error: &toml::de::Error, text: &str, path: &Path) -> Error {
    let line = error.span().map_or(1, |span| 1 + text[..span.start.min(text.len())].matches('\n').count());
    let place = format!("{}:{line}", path.display());
    let quoted: Vec<_> = error.message().split('`').skip(1).step_by(2).collect();
    if !error.message().starts_with("unknown field") || quoted.is_empty() {
        return Error::usage(format!("{place}: {}", error.message().replace('\n', " ")));
    }
    let (key, known) = (quoted[0], &quoted[1..]);
    let nearest = known.iter().min_by_key(|candidate| strsim::damerau_levenshtein(candidate, key));
    let unknown = Error::usage(format!("{place}: unknown key `{key}`"));
    match nearest {
        Some(nearest) => unknown.hint(format!("did you mean `{nearest}`? known here: {}", known.join(", "))),
        None => unknown.hint("this table takes no keys"),
    }
}

impl Matrix {
    /// Refuses values that no plan can be made from.
    fn check(&self) -> Result<()> {
        let refuse = |message: &str| Err(Error::usage(message));
        for (place, arm) in self.arms.iter().enumerate() {
            if arm.name.is_empty() {
                return Err(Error::usage(format!("arm {} has no `name`", place + 1)));
            }
            if self.arms[..place].iter().any(|other| other.name == arm.name) {
                return Err(Error::usage(format!("two arms are called `{}`", arm.name)));
            }
        }
        let names = self.env.keys().chain(self.axes.env.keys()).chain(self.arms.iter().flat_map(|arm| arm.env.keys()));
        if let Some(name) = names.into_iter().find(|name| name.is_empty() || name.contains(['=', '\0'])) {
            return Err(Error::usage(format!("`{name}` under `env` is no name of a variable")));
        }
        if let Some((name, _)) = self.axes.env.iter().find(|(_, values)| values.is_empty()) {
            return Err(Error::usage(format!("`axes.env.{name}` has no value, so there would be no arm"))
                .hint("list its values, or leave it out"));
        }
        if self.concurrency == 0 || self.axes.concurrency.contains(&0) {
            return refuse("`concurrency` must be at least 1");
        }
        if let Some(bisect) = &self.bisect {
            if bisect.confidence.is_some_and(|share| !(share > 0.5 && share < 1.0)) {
                return refuse("`bisect.confidence` must lie between 0.5 and 1");
            }
            if bisect.sessions_per_probe.is_some_and(|sessions| !(1..=MOST_SESSIONS).contains(&sessions)) {
                return Err(Error::usage(format!("`bisect.sessions_per_probe` must be between 1 and {MOST_SESSIONS}")));
            }
        }
        self.gate.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure<T: DeserializeOwned + std::fmt::Debug>(text: &str) -> (String, String) {
        let error = parse::<T>(text, Path::new("x.toml")).unwrap_err();
        (error.to_string(), error.cure().unwrap_or_default().to_owned())
    }

    #[test]
    fn every_shipped_file_is_good() {
        for (name, _) in SHIPPED {
            if ["agentic", "long-context"].contains(name) {
                assert_eq!(scenario(name).unwrap().name, *name);
                assert_eq!(matrix(name).unwrap_err().cure(), Some(format!("use `toolstorm run {name}`").as_str()));
            } else {
                let (matrix, _) = matrix(name).unwrap();
                assert_eq!(matrix.name, *name);
                assert!(!matrix.arms.is_empty());
                assert_eq!(scenario(name).unwrap_err().cure(), Some(format!("use `toolstorm matrix {name}`").as_str()));
            }
        }
    }

    #[test]
    fn an_unknown_key_names_file_line_key_and_the_nearest_one() {
        let (message, hint) = failure::<Scenario>("name = \"x\"\n\nruonds = 3\n");
        assert_eq!(message, "x.toml:3: unknown key `ruonds`");
        assert!(hint.starts_with("did you mean `rounds`?"), "{hint}");
        let text = "name = \"x\"\nscenario = \"agentic\"\n[[arm]]\nname = \"a\"\nexpct = \"clean\"\n";
        let (message, hint) = failure::<Matrix>(text);
        assert_eq!(message, "x.toml:5: unknown key `expct`");
        assert!(hint.starts_with("did you mean `expect`?"), "{hint}");
    }

    #[test]
    fn wrong_types_and_broken_syntax_name_their_line() {
        let (message, _) = failure::<Scenario>("name = \"x\"\nrounds = \"many\"\n");
        assert!(message.starts_with("x.toml:2:") && message.contains("range"), "{message}");
        let (message, _) = failure::<Scenario>("name = \"x\"\nrounds = [7, 3]\n");
        assert!(message.contains("is empty"), "{message}");
        let (message, _) = failure::<Scenario>("name = \n");
        assert!(message.starts_with("x.toml:1:"), "{message}");
    }

    #[test]
    fn names_and_axes_that_make_no_arm_are_refused() {
        let check = |text: &str| {
            let text = format!("name = \"m\"\nscenario = \"agentic\"\n{text}");
            parse::<Matrix>(&text, Path::new("x.toml")).unwrap().check().map_err(|error| error.to_string())
        };
        for text in
            ["[env]\n\"A=B\" = \"1\"", "[axes.env]\n\"\" = [\"1\"]", "[[arm]]\nname = \"a\"\nenv = { \"\" = \"\" }"]
        {
            assert!(check(text).unwrap_err().contains("no name of a variable"), "{text}");
        }
        assert!(check("[axes.env]\nA = []").unwrap_err().contains("`axes.env.A` has no value"));
        check("[env]\nA = \"1\"\n[axes.env]\nB = [\"\"]").unwrap();
    }

    #[test]
    fn a_missing_file_lists_what_there_is() {
        let error = matrix("nowhere.toml").unwrap_err();
        assert!(error.cure().is_some_and(|hint| hint.contains("seed-table")));
    }
}
