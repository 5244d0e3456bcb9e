//! Settings that cannot take effect where the load goes: refused, since a report would show them as if they had.

use std::collections::BTreeMap;

use super::{Arm, Plan, evidence};
use crate::{
    error::{Error, Result},
    scenario::{Arrival, Ready, TargetKind, TargetSpec},
};

/// Refuses what `plan` sets in vain.
pub fn check_settings(plan: &Plan) -> Result<()> {
    match plan.target.kind {
        TargetKind::Builtin => builtin(plan)?,
        TargetKind::Url => url(plan)?,
        TargetKind::Command => {}
    }
    if plan.load.arrival == Arrival::Closed && plan.load.rate.is_some() {
        return Err(Error::usage("a `rate` is set, but under closed arrivals a session starts when another one ends")
            .hint("give --arrival poisson (or constant, burst), or leave the rate out"));
    }
    overwritten(plan)?;
    file_names(&plan.arms)
}

/// Refuses variables that every launch sets itself.
fn overwritten(plan: &Plan) -> Result<()> {
    for name in ["TOOLSTORM_SEED", "TOOLSTORM_LOCKSTEP"] {
        if let Some(arm) = plan.arms.iter().find(|arm| arm.env.contains_key(name)) {
            return Err(Error::usage(format!("arm `{}` sets {name}, which every launch sets itself", arm.name))
                .hint("leave it out; launch seeds follow from --seed, lockstep from --lockstep"));
        }
    }
    Ok(())
}

fn builtin(plan: &Plan) -> Result<()> {
    let TargetSpec { command, base_url, api_key_env, ready, .. } = &plan.target;
    let some_arm = |set: fn(&Arm) -> bool| plan.arms.iter().any(set);
    let vain = [
        ("target.command", !command.is_empty()),
        ("target.base_url", base_url.is_some()),
        ("target.api_key_env", api_key_env.is_some()),
        ("target.ready.path", ready.path != Ready::default().path),
        ("arm.command", some_arm(|arm| !arm.command.is_empty())),
        ("arm.base_url", some_arm(|arm| arm.base_url.is_some())),
    ];
    let why = "the target is the built-in engine, which does not take it";
    refuse(&vain, why, "set `kind` under [target], or leave it out")
}

fn url(plan: &Plan) -> Result<()> {
    let TargetSpec { command, args, ready, stop_timeout, .. } = &plan.target;
    let some_arm = |set: fn(&Arm) -> bool| plan.arms.iter().any(set);
    let vain = [
        ("target.command", !command.is_empty()),
        ("target.args", !args.is_empty()),
        ("target.ready", *ready != Ready::default()),
        ("target.stop_timeout", stop_timeout.is_some()),
        ("env", some_arm(|arm| !arm.env.is_empty())),
        ("arm.args", some_arm(|arm| !arm.args.is_empty())),
        ("arm.command", some_arm(|arm| !arm.command.is_empty())),
    ];
    let why = "the target is a url, and a server that someone else runs keeps the configuration that it has";
    let cure =
        "set `kind = \"command\"` to have servers started, or leave it out and name the arms after what runs there";
    refuse(&vain, why, cure)
}

fn refuse(vain: &[(&str, bool)], why: &str, cure: &str) -> Result<()> {
    match vain.iter().find(|(_, set)| *set) {
        Some((key, _)) => Err(Error::usage(format!("`{key}` is set, but {why}")).hint(cure)),
        None => Ok(()),
    }
}

impl Plan {
    /// Puts the server at `url`, which someone else runs, in the place of those that the plan would start. An arm of a plan
    /// for such servers keeps an address of its own.
    pub fn redirect(&mut self, url: &str) {
        let TargetSpec { kind, model, api_key_env, extra_body, .. } = std::mem::take(&mut self.target);
        for arm in &mut self.arms {
            (arm.env, arm.args, arm.command) = Default::default();
            arm.base_url = arm.base_url.take().filter(|_| kind == TargetKind::Url);
        }
        let (kind, base_url) = (TargetKind::Url, Some(url.to_owned()));
        self.target = TargetSpec { kind, model, base_url, api_key_env, extra_body, ..TargetSpec::default() };
    }
}

/// Refuses a redirection that leaves nothing of a comparison, or that no arm would follow.
pub(super) fn check_redirection(plan: &Plan) -> Result<()> {
    let own = |arm: &Arm| arm.base_url.clone().filter(|_| plan.target.kind == TargetKind::Url);
    if plan.arms.iter().all(|arm| own(arm).is_some()) {
        return Err(Error::usage("--base-url: every arm has a `base_url` of its own").hint("leave --base-url out"));
    }
    for (place, arm) in plan.arms.iter().enumerate() {
        let same = |other: &&Arm| own(other) == own(arm) && configuration(other) != configuration(arm);
        if let Some(other) = plan.arms[..place].iter().find(same) {
            return Err(Error::usage(format!(
                "--base-url: arms `{}` and `{}` differ in what only a server that we start can be given",
                other.name, arm.name
            ))
            .hint("leave --base-url out; for servers that run already, give each arm a `base_url` of its own"));
        }
    }
    Ok(())
}

fn configuration(arm: &Arm) -> (&BTreeMap<String, String>, &[String], &[String]) {
    (&arm.env, &arm.args, &arm.command)
}

/// Refuses arms whose logs and captures would lie in one place.
fn file_names(arms: &[Arm]) -> Result<()> {
    let mut names = BTreeMap::new();
    for arm in arms {
        if let Some(other) = names.insert(evidence::file_name(&arm.name), &arm.name) {
            return Err(Error::usage(format!("arms `{other}` and `{}` would write to the same files", arm.name))
                .hint("let their names differ in letters and digits of ASCII, or in - _ . = @"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::{
        run::{Overrides, Plan, resolve},
        scenario::{Arrival, Matrix, Scenario},
    };

    fn plan(text: &str, overrides: &Overrides) -> crate::error::Result<Plan> {
        let matrix: Matrix = toml::from_str(&format!("name = \"m\"\nscenario = \"s\"\n{text}")).unwrap();
        resolve(matrix, Scenario::default(), overrides)
    }

    #[test]
    fn what_reaches_no_server_is_refused_by_its_key() {
        const URL: &str = "[target]\nkind = \"url\"\nbase_url = \"http://x\"\n";
        for (key, text) in [
            ("target.command", "[target]\ncommand = [\"server\"]"),
            ("target.base_url", "[target]\nbase_url = \"http://x\""),
            ("arm.base_url", "[[arm]]\nname = \"a\"\nbase_url = \"http://x\""),
            ("arm.command", "[[arm]]\nname = \"a\"\ncommand = [\"server\"]"),
            ("target.api_key_env", "[target]\napi_key_env = \"KEY\""),
            ("target.ready.path", "[target]\nready = { path = \"/up\" }"),
            ("rate", "rate = 3.0"),
            ("target.command", &format!("{URL}command = [\"server\"]")),
            ("target.args", &format!("{URL}args = [\"--fast\"]")),
            ("target.ready", &format!("{URL}ready = {{ timeout = \"1s\" }}")),
            ("target.stop_timeout", &format!("{URL}stop_timeout = \"1s\"")),
            ("env", &format!("{URL}[env]\nA = \"1\"")),
            ("env", &format!("{URL}[axes.env]\nA = [\"0\", \"1\"]")),
            ("arm.args", &format!("{URL}[[arm]]\nname = \"a\"\nargs = [\"--fast\"]")),
            ("arm.command", &format!("{URL}[[arm]]\nname = \"a\"\ncommand = [\"server\"]")),
        ] {
            let error = plan(text, &Overrides::default()).expect_err(text);
            assert!(
                error.to_string().contains(&format!("`{key}` is set")) && error.cure().is_some(),
                "{text}: {error}"
            );
        }
        for text in [URL, "[target]\nargs = [\"--fast\"]\nready = { timeout = \"1s\" }\n[env]\nA = \"1\""] {
            plan(text, &Overrides::default()).unwrap();
        }
    }

    #[test]
    fn an_address_takes_the_place_of_the_files_servers_but_not_of_a_comparison() {
        let overrides = Overrides { base_url: Some("http://x".into()), ..Overrides::default() };
        let one = "[target]\nkind = \"command\"\ncommand = [\"server\", \"{port}\"]\nmodel = \"m\"\n[env]\nA = \"1\"\n";
        let two = |second: &str| format!("{one}[[arm]]\nname = \"a\"\n[[arm]]\nname = \"b\"\n{second}");
        let resolved = plan(&two("concurrency = 1"), &overrides).unwrap();
        assert!(resolved.target.command.is_empty() && resolved.arms.iter().all(|arm| arm.env.is_empty()));
        assert_eq!(resolved.target.model.as_deref(), Some("m"));
        let own = "base_url = \"http://y\"\n";
        let differing = "env = { A = \"0\" }\n";
        for second in [differing, "args = [\"--fast\"]", "command = [\"other\"]", &[differing, own].concat()] {
            let error = plan(&two(second), &overrides).expect_err(second);
            assert!(error.to_string().contains("arms `a` and `b` differ"), "{second}: {error}");
        }
        // Where a command's server listens is given up with the command; a running server's address is its arm's own.
        assert_eq!(plan(&two(own), &overrides).unwrap().arms[1].base_url, None);
        let running = |first: &str| {
            format!("[target]\nkind = \"url\"\n[[arm]]\nname = \"a\"\n{first}[[arm]]\nname = \"b\"\n{own}")
        };
        let kept = plan(&running(""), &overrides).unwrap();
        assert_eq!((kept.arms[0].base_url.as_deref(), kept.arms[1].base_url.as_deref()), (None, Some("http://y")));
        assert!(plan(&running(own), &overrides).unwrap_err().to_string().contains("every arm"));
    }

    #[test]
    fn closed_arrivals_give_up_a_files_rate_and_refuse_a_given_one() {
        let text = "arrival = \"poisson\"\nrate = 3.0";
        let closed = Overrides { arrival: Some(Arrival::Closed), ..Overrides::default() };
        assert_eq!(plan(text, &closed).unwrap().load.rate, None);
        assert!(plan(text, &Overrides { rate: Some(2.0), ..closed }).is_err());
    }

    #[test]
    fn what_a_launch_sets_itself_is_no_toggle() {
        let text = |name: &str| format!("[axes.env]\n{name} = [\"1\", \"2\"]");
        for name in ["TOOLSTORM_SEED", "TOOLSTORM_LOCKSTEP"] {
            assert!(plan(&text(name), &Overrides::default()).unwrap_err().to_string().contains(name));
        }
    }

    #[test]
    fn arms_do_not_share_files() {
        let text = "[[arm]]\nname = \"a b\"\n[[arm]]\nname = \"a/b\"";
        assert!(plan(text, &Overrides::default()).unwrap_err().to_string().contains("arms `a b` and `a/b`"));
    }
}
