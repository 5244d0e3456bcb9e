//! Matrix file and flags to a plan.

use std::collections::BTreeMap;

use super::{
    Arm, Load, Partition, Plan, Until,
    settings::{check_redirection, check_settings},
};
use crate::{
    error::{Error, Result},
    scenario::{ArmSpec, Arrival, Matrix, Parity, Range, Scenario, Span, TargetKind, UntilSpec, file::MOST_SESSIONS},
    seed::Seed,
    target,
};

/// Launches of an arm at most.
const MOST_REPETITIONS: u32 = 10_000;

/// Sessions a second at least: the gap between two starts is a length of time that clocks can hold.
const LOWEST_RATE: f64 = 1e-6;

/// What the command line says over the file's defaults; never over an arm's own value.
#[derive(Debug, Clone, Default)]
pub struct Overrides {
    /// Sessions an arm.
    pub sessions: Option<u64>,
    /// Sessions in flight at once; several make an axis.
    pub concurrency: Vec<u32>,
    /// Rounds a session.
    pub rounds: Option<u32>,
    /// The run's seed.
    pub seed: Option<Seed>,
    /// Start sessions for this long.
    pub duration: Option<Span>,
    /// Time whose sessions are not counted.
    pub warmup: Option<Span>,
    /// Time to full concurrency.
    pub ramp: Option<Span>,
    /// When sessions start.
    pub arrival: Option<Arrival>,
    /// Sessions a second.
    pub rate: Option<f64>,
    /// Limit of a request.
    pub timeout: Option<Span>,
    /// Limit of silence.
    pub stall_timeout: Option<Span>,
    /// Retries.
    pub retries: Option<u32>,
    /// Share of cancelled rounds.
    pub cancel: Option<f64>,
    /// Lockstep or not.
    pub lockstep: Option<bool>,
    /// Share of streamed requests.
    pub stream: Option<f64>,
    /// In which other forms turns are asked again.
    pub parity: Option<Parity>,
    /// Members of every request body, as JSON.
    pub extra_body: Option<String>,
    /// Model name.
    pub model: Option<String>,
    /// A server that someone else runs.
    pub base_url: Option<String>,
    /// Name of the variable with the API key.
    pub api_key_env: Option<String>,
    /// Allowed corrupted sessions.
    pub max_corruption: Option<u64>,
    /// Allowed upper bound.
    pub max_upper: Option<f64>,
    /// Confidence of bounds.
    pub confidence: Option<f64>,
    /// Wanted sessions.
    pub min_sessions: Option<u64>,
    /// `slice:1/4`.
    pub partition: Option<String>,
    /// A sequential test.
    pub until: Option<UntilSpec>,
}

/// The plan of `matrix` over `scenario` under `overrides`.
pub fn resolve(matrix: Matrix, scenario: Scenario, overrides: &Overrides) -> Result<Plan> {
    let mut plan = Plan {
        arms: arms(&matrix, overrides)?,
        seed: overrides.seed.map_or(matrix.seed, |seed| seed.0),
        load: load(&matrix, overrides)?,
        partition: overrides.partition.as_deref().map(str::parse).transpose()?,
        name: matrix.name,
        scenario,
        target: matrix.target,
        order: matrix.order,
        gate: matrix.gate,
    };
    plan.scenario.context = matrix.context.unwrap_or(plan.scenario.context);
    workload(&mut plan.scenario, matrix.rounds, overrides)?;
    target(&mut plan, overrides)?;
    gate(&mut plan, overrides);
    check(&plan, overrides)?;
    Ok(plan)
}

fn load(matrix: &Matrix, overrides: &Overrides) -> Result<Load> {
    let builtin = matrix.target.kind == TargetKind::Builtin && overrides.base_url.is_none();
    Ok(Load {
        // Only the built-in engine knows lockstep; a file's default gives way to another target, a flag does not.
        lockstep: overrides.lockstep.unwrap_or(matrix.lockstep && builtin && overrides.duration.is_none()),
        arrival: overrides.arrival.unwrap_or(matrix.arrival),
        // Closed arrivals over a file with open ones leave its rate without a use.
        rate: overrides.rate.or(matrix.rate.filter(|_| overrides.arrival != Some(Arrival::Closed))),
        duration: overrides.duration.or(matrix.duration),
        warmup: overrides.warmup.unwrap_or(matrix.warmup),
        ramp: overrides.ramp.unwrap_or(matrix.ramp),
        connect_timeout: matrix.connect_timeout,
        first_byte_timeout: matrix.first_byte_timeout,
        stall_timeout: overrides.stall_timeout.unwrap_or(matrix.stall_timeout),
        timeout: overrides.timeout.unwrap_or(matrix.timeout),
        retries: overrides.retries.unwrap_or(matrix.retries),
        until: overrides.until.or(matrix.until).map(Until::try_from).transpose()?,
    })
}

fn workload(scenario: &mut Scenario, rounds: Option<Range>, overrides: &Overrides) -> Result<()> {
    if let Some(rounds) = overrides.rounds.map(|n| Range(n.into(), n.into())).or(rounds) {
        scenario.rounds = rounds;
    }
    if let Some(share) = overrides.stream {
        scenario.stream = share;
    }
    if let Some(share) = overrides.cancel {
        scenario.cancel = share;
    }
    scenario.parity = overrides.parity.unwrap_or(scenario.parity);
    scenario.check()
}

fn target(plan: &mut Plan, overrides: &Overrides) -> Result<()> {
    if let Some(url) = &overrides.base_url {
        check_redirection(plan)?;
        plan.redirect(url);
    }
    if overrides.model.is_some() {
        plan.target.model.clone_from(&overrides.model);
    }
    if overrides.api_key_env.is_some() {
        plan.target.api_key_env.clone_from(&overrides.api_key_env);
    }
    if let Some(text) = &overrides.extra_body {
        let members: serde_json::Map<_, _> = serde_json::from_str(text)
            .map_err(|error| Error::usage(format!("--extra-body is no JSON object: {error}")))?;
        plan.target.extra_body.extend(members);
    }
    Ok(())
}

fn gate(plan: &mut Plan, overrides: &Overrides) {
    let gate = &mut plan.gate;
    gate.max_corruption = overrides.max_corruption.unwrap_or(gate.max_corruption);
    gate.max_upper = overrides.max_upper.unwrap_or(gate.max_upper);
    gate.confidence = overrides.confidence.unwrap_or(gate.confidence);
    gate.min_sessions = overrides.min_sessions.unwrap_or(gate.min_sessions);
}

/// The arms times the axes; one arm named after the matrix where the file lists none.
fn arms(matrix: &Matrix, overrides: &Overrides) -> Result<Vec<Arm>> {
    let unnamed = [ArmSpec { name: matrix.name.clone(), ..ArmSpec::default() }];
    let specs = if matrix.arms.is_empty() { &unnamed[..] } else { &matrix.arms };
    let concurrencies = match overrides.concurrency.as_slice() {
        [] => matrix.axes.concurrency.as_slice(),
        // One value replaces the file's axis by none.
        [_] => &[],
        several => several,
    };
    let default = overrides.concurrency.first().copied().unwrap_or(matrix.concurrency);
    let mut arms = Vec::new();
    for spec in specs {
        for env in product(&matrix.axes.env) {
            let axis: Vec<Option<u32>> = match (spec.concurrency, concurrencies.is_empty()) {
                (None, false) => concurrencies.iter().copied().map(Some).collect(),
                _ => vec![None],
            };
            for point in axis {
                let mut arm = arm(matrix, spec, overrides);
                arm.concurrency = point.or(spec.concurrency).unwrap_or(default);
                let mut marks: Vec<_> = env.iter().map(|(name, value)| format!("{name}={value}")).collect();
                marks.extend(point.map(|point| format!("concurrency={point}")));
                if !marks.is_empty() {
                    arm.name = format!("{}@{}", arm.name, marks.join(","));
                }
                arm.env.extend(env.clone());
                arms.push(arm);
            }
        }
    }
    if arms.iter().any(|arm| arm.concurrency == 0) {
        return Err(Error::usage("--concurrency must be at least 1"));
    }
    Ok(arms)
}

fn arm(matrix: &Matrix, spec: &ArmSpec, overrides: &Overrides) -> Arm {
    let mut env = matrix.env.clone();
    env.extend(spec.env.clone());
    Arm {
        name: spec.name.clone(),
        expect: spec.expect,
        env,
        args: [matrix.target.args.clone(), spec.args.clone()].concat(),
        command: spec.command.clone().unwrap_or_else(|| matrix.target.command.clone()),
        base_url: spec.base_url.clone(),
        concurrency: 1,
        sessions: spec.sessions.or(overrides.sessions).unwrap_or(matrix.sessions),
        repetitions: spec.repetitions.unwrap_or(matrix.repetitions),
        hazards: spec.hazards,
    }
}

/// Every combination of the variables' values.
fn product(axes: &BTreeMap<String, Vec<String>>) -> Vec<BTreeMap<String, String>> {
    axes.iter().fold(vec![BTreeMap::new()], |points, (name, values)| {
        let extend = |point: &BTreeMap<String, String>| {
            let with = |value: &String| {
                let mut point = point.clone();
                point.insert(name.clone(), value.clone());
                point
            };
            values.iter().map(with).collect::<Vec<_>>()
        };
        points.iter().flat_map(extend).collect()
    })
}

fn check(plan: &Plan, overrides: &Overrides) -> Result<()> {
    let refuse = |message: String| Err(Error::usage(message));
    let sessions = plan.arms.iter().map(|arm| arm.sessions).chain(overrides.sessions);
    if let Some(wrong) = sessions.into_iter().find(|sessions| !(1..=MOST_SESSIONS).contains(sessions)) {
        return refuse(format!("`sessions` is {wrong}: it must be between 1 and {MOST_SESSIONS}"));
    }
    if let Some(arm) = plan.arms.iter().find(|arm| !(1..=MOST_REPETITIONS).contains(&arm.repetitions)) {
        let (name, wrong) = (&arm.name, arm.repetitions);
        return refuse(format!(
            "`repetitions` of arm `{name}` is {wrong}: it must be between 1 and {MOST_REPETITIONS}"
        ));
    }
    if plan.load.arrival != Arrival::Closed && plan.load.rate.is_none() {
        let hint = "give --rate, in sessions a second";
        return Err(Error::usage("open arrivals need a rate").hint(hint));
    }
    if let Some(rate) = plan.load.rate.filter(|rate| !(*rate >= LOWEST_RATE && rate.is_finite())) {
        return refuse(format!("`rate` is {rate:?}: it must be a number of sessions a second, at least {LOWEST_RATE}"));
    }
    if plan.load.duration.is_some_and(|span| span.0.is_zero()) || plan.target.ready.timeout.0.is_zero() {
        return refuse("`duration` and `ready.timeout` must be longer than 0".into());
    }
    if plan.load.timeout.0.is_zero() || plan.load.stall_timeout.0.is_zero() {
        return refuse("a limit of 0 would end every request".into());
    }
    plan.gate.check()?;
    check_settings(plan)?;
    let homeless = plan.target.base_url.is_none() && plan.arms.iter().any(|arm| arm.base_url.is_none());
    if plan.target.kind == TargetKind::Url && homeless {
        return refuse("the target is a url but no `base_url` is given".into());
    }
    if plan.target.kind == TargetKind::Url {
        let addresses = plan.arms.iter().map(|arm| arm.base_url.as_ref()).chain([plan.target.base_url.as_ref()]);
        addresses.flatten().try_for_each(|address| target::base_url(address).map(drop))?;
    }
    if let Some(arm) = plan.arms.iter().find(|arm| arm.hazards && plan.target.kind == TargetKind::Url) {
        return Err(Error::usage(format!(
            "arm `{}` has `hazards = true`, but its server is only an address",
            arm.name
        ))
        .hint("graphs are captured in a server that the target starts: leave it out, or give a `command`"));
    }
    if plan.target.kind == TargetKind::Command && plan.arms.iter().any(|arm| arm.command.is_empty()) {
        return refuse("the target is a command but no `command` is given".into());
    }
    if plan.load.duration.is_some() && plan.partition.is_some() {
        return refuse("a run that goes by time has no parts: --duration and --partition exclude each other".into());
    }
    if plan.load.lockstep {
        lockstep(plan, overrides)?;
    }
    // The first sessions show whether any can be made.
    (0..8).try_for_each(|number| plan.scenario.session(plan.workload_seed(), number).map(drop))
}

/// Refuses what cannot be a function of the seeds.
fn lockstep(plan: &Plan, overrides: &Overrides) -> Result<()> {
    let refuse = |message: &str| Err(Error::usage(message).hint("leave it out, or give --no-lockstep"));
    if plan.target.kind != TargetKind::Builtin {
        return refuse("lockstep needs the built-in target");
    }
    if plan.load.arrival != Arrival::Closed {
        return refuse("lockstep needs closed arrivals");
    }
    if plan.load.duration.is_some() || !plan.load.warmup.0.is_zero() || !plan.load.ramp.0.is_zero() {
        return refuse("lockstep counts sessions: --duration, --warmup and --ramp go by time");
    }
    if overrides.retries.unwrap_or(plan.load.retries) > 0 {
        return refuse("lockstep cannot send a request again");
    }
    Ok(())
}

impl std::str::FromStr for Partition {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let fail = || Error::usage(format!("`{text}` is no partition")).hint("write `slice:1/4`: part 1 of 4");
        let (part, of) = text.strip_prefix("slice:").and_then(|rest| rest.split_once('/')).ok_or_else(fail)?;
        let (part, of): (u64, u64) = (part.parse().map_err(|_| fail())?, of.parse().map_err(|_| fail())?);
        if part == 0 || part > of { Err(fail()) } else { Ok(Self { part, of }) }
    }
}

impl std::fmt::Display for Partition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "slice:{}/{}", self.part, self.of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::file;

    fn plan(name: &str, overrides: &Overrides) -> Result<Plan> {
        let (matrix, scenario) = file::matrix(name)?;
        resolve(matrix, scenario, overrides)
    }

    #[test]
    fn a_flag_overrides_the_default_and_never_an_arms_own_value() {
        let overrides = Overrides { concurrency: vec![16], sessions: Some(7), ..Overrides::default() };
        let plan = plan("seed-table", &overrides).unwrap();
        let arm = |name: &str| plan.arms.iter().find(|arm| arm.name == name).unwrap();
        assert_eq!((arm("baseline").concurrency, arm("concurrency-1").concurrency), (16, 1));
        assert_eq!(arm("baseline").sessions, 7);
        assert_eq!(arm("fp8").env["SGLANG_DSV4_BF16_INDEX_K"], "0");
        assert_eq!(plan.launches().len(), 14);
    }

    #[test]
    fn interleaved_launches_run_every_arm_before_any_repeats() {
        let plan = plan("seed-table", &Overrides::default()).unwrap();
        let launches = plan.launches();
        assert_eq!(launches.iter().filter(|launch| launch.repetition == 0).count(), 12);
        assert!(launches[..12].iter().all(|launch| launch.repetition == 0));
        assert_eq!(plan.launch_seed(0), plan.launch_seed(0));
        assert_ne!(plan.launch_seed(0), plan.launch_seed(1));
    }

    #[test]
    fn several_concurrencies_make_an_axis() {
        let plan = plan("quick", &Overrides { concurrency: vec![16, 64], ..Overrides::default() }).unwrap();
        let names: Vec<_> = plan.arms.iter().map(|arm| arm.name.as_str()).collect();
        assert_eq!(names[..2], ["baseline@concurrency=16", "baseline@concurrency=64"]);
        assert_eq!(plan.arms.len(), 4);
    }

    #[test]
    fn partitions_cover_all_sessions_once() {
        let mut all = Vec::new();
        for part in 1..=3 {
            let overrides = Overrides { partition: Some(format!("slice:{part}/3")), ..Overrides::default() };
            let plan = plan("quick", &overrides).unwrap();
            all.extend(plan.sessions(&plan.arms[0]));
        }
        all.sort_unstable();
        assert_eq!(all, (0..64).collect::<Vec<_>>());
        for text in ["slice:0/3", "slice:4/3", "1/3", "slice:a/b"] {
            assert!(text.parse::<Partition>().is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_that_no_run_can_keep_are_refused_by_name() {
        let refused = |overrides: Overrides| plan("quick", &overrides).unwrap_err().to_string();
        let upper = |share| Overrides { max_upper: Some(share), ..Overrides::default() };
        for share in [f64::NAN, f64::INFINITY, -0.1, 1.1] {
            assert!(refused(upper(share)).contains("`gate.max_upper`"), "{share}");
        }
        let confidence = |share| Overrides { confidence: Some(share), ..Overrides::default() };
        assert!(refused(confidence(f64::NAN)).contains("`gate.confidence`"));
        for rate in [1e-300, 0.0, -1.0, f64::NAN, f64::INFINITY] {
            let overrides = Overrides { rate: Some(rate), arrival: Some(Arrival::Poisson), ..Overrides::default() };
            assert!(refused(overrides).starts_with("`rate` is "), "{rate}");
        }
        for sessions in [0, u64::MAX] {
            let overrides = Overrides { sessions: Some(sessions), ..Overrides::default() };
            assert!(refused(overrides).contains("`sessions`"), "{sessions}");
        }
    }

    #[test]
    fn lockstep_refuses_what_goes_by_time() {
        let overrides = Overrides { warmup: Some(Span::seconds(1)), ..Overrides::default() };
        assert!(plan("quick", &overrides).unwrap_err().cure().is_some());
        let overrides = Overrides { base_url: Some("http://x".into()), ..Overrides::default() };
        assert!(!plan("gate", &overrides).unwrap().load.lockstep);
        let overrides = Overrides { lockstep: Some(true), ..overrides };
        assert!(plan("gate", &overrides).is_err());
    }
}
