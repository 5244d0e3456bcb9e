//! What may differ between good and bad: environment variables and arguments of the server.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Result},
    run::{Arm, Plan},
    scenario::{BisectSpec, Endpoint, Toggle},
};

/// One difference between good and bad.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Switch {
    /// An environment variable; `None` is unset.
    Env {
        /// Its name.
        name: String,
        /// Its good value.
        good: Option<String>,
        /// Its bad value.
        bad: Option<String>,
    },
    /// An argument of the server with its values; `None` is left out.
    Arg {
        /// The flag.
        name: String,
        /// Its values in the good configuration.
        good: Option<Vec<String>>,
        /// Its values in the bad one.
        bad: Option<Vec<String>>,
    },
}

impl Switch {
    /// Its name.
    pub fn name(&self) -> &str {
        match self {
            Self::Env { name, .. } | Self::Arg { name, .. } => name,
        }
    }

    fn differs(&self) -> bool {
        match self {
            Self::Env { good, bad, .. } => good != bad,
            Self::Arg { good, bad, .. } => good != bad,
        }
    }

    /// Puts it to its good or its bad value.
    fn set(&self, arm: &mut Arm, is_bad: bool) {
        match self {
            Self::Env { name, good, bad } => match if is_bad { bad } else { good } {
                Some(value) => {
                    arm.env.insert(name.clone(), value.clone());
                }
                None => {
                    arm.env.remove(name);
                }
            },
            Self::Arg { name, good, bad } => {
                let mut flags = flags(&arm.args);
                flags.retain(|flag| flag.name != *name);
                let values = if is_bad { bad } else { good };
                flags.extend(values.clone().map(|values| Flag { name: name.clone(), values }));
                arm.args = flags.into_iter().flat_map(Flag::words).collect();
            }
        }
    }
}

/// The bad value, as a person would type it.
impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Env { name, bad: Some(value), .. } => write!(f, "{name}={value}"),
            Self::Env { name, bad: None, .. } => write!(f, "{name} unset"),
            Self::Arg { name, bad: Some(values), .. } => {
                write!(f, "{name}")?;
                values.iter().try_for_each(|value| write!(f, " {value}"))
            }
            Self::Arg { name, bad: None, .. } => write!(f, "no {name}"),
        }
    }
}

/// A flag with the words that follow it, or words before any flag, whose name is empty.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Flag {
    name: String,
    values: Vec<String>,
}

impl Flag {
    fn words(self) -> impl Iterator<Item = String> {
        Some(self.name).filter(|name| !name.is_empty()).into_iter().chain(self.values)
    }
}

/// `--a 1 --b --c=2` as flags; `--c=2` is the flag `--c` with the value `2`.
fn flags(args: &[String]) -> Vec<Flag> {
    let mut flags: Vec<Flag> = Vec::new();
    for word in args {
        match (word.starts_with("--"), word.split_once('='), flags.last_mut()) {
            (true, Some((name, value)), _) => flags.push(Flag { name: name.into(), values: vec![value.into()] }),
            (true, None, _) => flags.push(Flag { name: word.clone(), values: Vec::new() }),
            (false, _, Some(flag)) => flag.values.push(word.clone()),
            (false, _, None) => flags.push(Flag { name: String::new(), values: vec![word.clone()] }),
        }
    }
    flags
}

/// The configurations between good and bad.
#[derive(Debug, Clone, PartialEq)]
pub struct Configurations {
    /// What every configuration shares.
    pub base: Arm,
    /// What may differ.
    pub switches: Vec<Switch>,
}

impl Configurations {
    /// What `[bisect]` describes, over the arms of the resolved plan.
    pub fn resolve(spec: &BisectSpec, plan: &Plan) -> Result<Self> {
        let good = endpoint("good", spec.good.as_ref(), plan)?;
        let bad = endpoint("bad", spec.bad.as_ref(), plan)?;
        if good.concurrency != bad.concurrency || good.command != bad.command || good.base_url != bad.base_url {
            return Err(Error::usage("[bisect]: good and bad differ in concurrency, command or address")
                .hint("only environment variables and arguments can be bisected"));
        }
        let switches = if spec.toggles.is_empty() {
            differences(&good, &bad)
        } else {
            spec.toggles.iter().map(|toggle| switch(toggle, &good, &bad)).collect::<Result<Vec<_>>>()?
        };
        let mut seen = BTreeSet::new();
        for switch in &switches {
            if !switch.differs() {
                return Err(Error::usage(format!("[bisect]: `{}` is the same in good and bad", switch.name()))
                    .hint("give it a `good` and a `bad` value that differ"));
            }
            if !seen.insert(switch.name()) {
                return Err(Error::usage(format!("[bisect]: `{}` is listed twice", switch.name())));
            }
        }
        if switches.is_empty() {
            return Err(Error::usage("[bisect]: good and bad do not differ")
                .hint("list `toggles`, or name two arms with other environments or arguments"));
        }
        Ok(Self { base: good, switches })
    }

    /// The configuration with the switches numbered in `bad` at their bad value, the others at their good one.
    pub fn arm(&self, bad: &[usize]) -> Arm {
        let mut arm = self.base.clone();
        for (index, switch) in self.switches.iter().enumerate() {
            switch.set(&mut arm, bad.contains(&index));
        }
        arm
    }

    /// The bad values of the switches numbered in `bad`.
    pub fn describe(&self, bad: &[usize]) -> Vec<String> {
        bad.iter().map(|&index| self.switches[index].to_string()).collect()
    }
}

fn endpoint(end: &str, given: Option<&Endpoint>, plan: &Plan) -> Result<Arm> {
    let first = plan.arms.first().ok_or_else(|| Error::usage("the matrix has no arm"))?;
    match given {
        None => Ok(first.clone()),
        Some(Endpoint::Arm(name)) => plan.arms.iter().find(|arm| arm.name == *name).cloned().ok_or_else(|| {
            let names: Vec<&str> = plan.arms.iter().map(|arm| arm.name.as_str()).collect();
            Error::usage(format!("[bisect]: {end}: there is no arm `{name}`"))
                .hint(format!("the arms are {}", names.join(", ")))
        }),
        Some(Endpoint::Env(env)) => {
            let mut arm = first.clone();
            arm.env.extend(env.clone());
            Ok(arm)
        }
    }
}

fn differences(good: &Arm, bad: &Arm) -> Vec<Switch> {
    let names: BTreeSet<&String> = good.env.keys().chain(bad.env.keys()).collect();
    let env = names.into_iter().map(|name| Switch::Env {
        name: name.clone(),
        good: good.env.get(name).cloned(),
        bad: bad.env.get(name).cloned(),
    });
    let values = |arm: &Arm| -> BTreeMap<String, Vec<String>> {
        flags(&arm.args).into_iter().map(|flag| (flag.name, flag.values)).collect()
    };
    let (one, two) = (values(good), values(bad));
    let names: BTreeSet<&String> = one.keys().chain(two.keys()).filter(|name| !name.is_empty()).collect();
    let args = names.into_iter().map(|name| Switch::Arg {
        name: name.clone(),
        good: one.get(name).cloned(),
        bad: two.get(name).cloned(),
    });
    env.chain(args).filter(Switch::differs).collect()
}

/// A listed toggle; where it gives no value at all, the values of good and bad.
fn switch(toggle: &Toggle, good: &Arm, bad: &Arm) -> Result<Switch> {
    let listed = toggle.good.is_some() || toggle.bad.is_some();
    match (&toggle.name, &toggle.arg) {
        (Some(name), None) if listed => {
            Ok(Switch::Env { name: name.clone(), good: toggle.good.clone(), bad: toggle.bad.clone() })
        }
        (Some(name), None) => {
            let value = |arm: &Arm| arm.env.get(name).cloned();
            Ok(Switch::Env { name: name.clone(), good: value(good), bad: value(bad) })
        }
        (None, Some(arg)) if listed => {
            let words = |text: &Option<String>| {
                text.as_ref().map(|text| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
            };
            Ok(Switch::Arg { name: arg.clone(), good: words(&toggle.good), bad: words(&toggle.bad) })
        }
        (None, Some(arg)) => {
            let values =
                |arm: &Arm| flags(&arm.args).into_iter().find(|flag| flag.name == *arg).map(|flag| flag.values);
            Ok(Switch::Arg { name: arg.clone(), good: values(good), bad: values(bad) })
        }
        _ => Err(Error::usage("[bisect]: a toggle has either a `name` (a variable) or an `arg` (a flag)")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        run::{Overrides, resolve},
        scenario::{Scenario, file},
    };

    fn configurations(text: &str) -> Result<Configurations> {
        let mut matrix = file::around(&Scenario::default(), BTreeMap::new()).unwrap();
        let table: toml::Table = text.parse().unwrap();
        let part = |key: &str| table.get(key).cloned();
        matrix.arms = part("arm").map(|arms| arms.try_into().unwrap()).unwrap_or_default();
        let spec: BisectSpec = part("bisect").unwrap().try_into().unwrap();
        let plan = resolve(matrix, Scenario::default(), &Overrides::default()).unwrap();
        Configurations::resolve(&spec, &plan)
    }

    const ARMS: &str = r#"
        [[arm]]
        name = "old"
        env = { A = "1", B = "x", SAME = "s" }
        args = ["model", "--tp", "2", "--fast"]
        [[arm]]
        name = "new"
        env = { A = "0", C = "y", SAME = "s" }
        args = ["model", "--tp=4", "--slow"]
    "#;

    #[test]
    fn every_difference_of_two_arms_is_a_switch() {
        let found = configurations(&format!("{ARMS}\n[bisect]\ngood = \"old\"\nbad = \"new\"")).unwrap();
        let shown: Vec<String> = found.switches.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["A=0", "B unset", "C=y", "no --fast", "--slow", "--tp 4"]);
        let arm = found.arm(&[0, 1, 2, 3, 4, 5]);
        assert_eq!((arm.env["A"].as_str(), arm.env.contains_key("B"), arm.env["C"].as_str()), ("0", false, "y"));
        assert_eq!(arm.args, ["model", "--slow", "--tp", "4"]);
        let good = found.arm(&[]);
        assert_eq!((good.env["A"].as_str(), good.env.contains_key("C")), ("1", false));
        assert_eq!(good.args.len(), 4);
    }

    #[test]
    fn listed_toggles_go_over_one_base() {
        let text = r#"
            [bisect]
            toggles = [{ name = "A", good = "0", bad = "1" }, { arg = "--tp", bad = "2" }]
        "#;
        let found = configurations(text).unwrap();
        assert_eq!(found.arm(&[1]).args, ["--tp", "2"]);
        assert_eq!(found.arm(&[0]).env["A"], "1");
        assert_eq!(found.describe(&[0, 1]), ["A=1", "--tp 2"]);
    }

    #[test]
    fn what_cannot_be_bisected_is_refused() {
        let wrong = |text: &str| configurations(text).unwrap_err().to_string();
        assert_eq!(
            wrong("[bisect]\ngood = { A = \"1\" }\nbad = { A = \"1\" }"),
            "[bisect]: good and bad do not differ"
        );
        let same = "[bisect]\ntoggles = [{ name = \"A\", good = \"1\", bad = \"1\" }]";
        assert_eq!(wrong(same), "[bisect]: `A` is the same in good and bad");
        let twice = "[bisect]\ntoggles = [{ name = \"A\", bad = \"1\" }, { name = \"A\", bad = \"2\" }]";
        assert_eq!(wrong(twice), "[bisect]: `A` is listed twice");
        assert!(wrong(&format!("{ARMS}\n[bisect]\ngood = \"older\"\nbad = \"new\"")).contains("no arm `older`"));
    }
}
