//! `toolstorm gate`: verdict on a finished run.

use std::path::PathBuf;

use crate::{
    error::{Error, Result},
    gate::{Ruling, exit_code, judge},
    report::{
        load,
        summary::{Outcome, Summary},
        terminal::Console,
    },
    scenario::Gate,
};

/// Arguments of `gate`. What is not given here is as the run was planned.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Result folder or its summary.json
    result: PathBuf,
    /// Corrupted sessions that an arm may have
    #[arg(long, value_name = "N")]
    max_corruption: Option<u64>,
    /// Largest upper bound of the session corruption rate
    #[arg(long, value_name = "SHARE")]
    max_upper: Option<f64>,
    /// Largest share of responses lost to transport, refusals or limits
    #[arg(long, value_name = "SHARE")]
    max_infra: Option<f64>,
    /// Confidence of the bounds
    #[arg(long, value_name = "SHARE")]
    confidence: Option<f64>,
    /// Fewer judged sessions than this are inconclusive
    #[arg(long, value_name = "N")]
    min_sessions: Option<u64>,
    /// A further condition on a number of the summary: `corruption_rate_upper<0.01`, or `ARM:p99_ttft_ms<=250`
    #[arg(long, value_name = "NAME<NUMBER")]
    threshold: Vec<String>,
    /// Exit with 125 instead of 2 and 3, so that `git bisect run` skips
    #[arg(long)]
    pub(super) git_bisect_codes: bool,
}

/// Runs `gate`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    let (summary, ruling) = rule(args)?;
    show(&ruling, console);
    console.emit(&ruled(summary, &ruling));
    Ok(exit_code(ruling.outcome))
}

fn rule(args: &Args) -> Result<(Summary, Ruling)> {
    let summary = load::summary(&args.result)?;
    let gate = gate(args)?;
    let ruling = judge(&summary, &gate)?;
    Ok((summary, ruling))
}

fn gate(args: &Args) -> Result<Gate> {
    let planned = load::gate(&args.result)?;
    let mut thresholds = planned.thresholds;
    thresholds.extend(args.threshold.iter().cloned());
    Ok(Gate {
        max_corruption: args.max_corruption.unwrap_or(planned.max_corruption),
        max_upper: share("--max-upper", args.max_upper)?.unwrap_or(planned.max_upper),
        max_infra: share("--max-infra", args.max_infra)?.unwrap_or(planned.max_infra),
        min_sessions: args.min_sessions.unwrap_or(planned.min_sessions),
        confidence: super::options::confidence(args.confidence)?.unwrap_or(planned.confidence),
        thresholds,
    })
}

fn share(flag: &str, value: Option<f64>) -> Result<Option<f64>> {
    match value {
        Some(value) if !(0.0..=1.0).contains(&value) => {
            Err(Error::usage(format!("{flag} {value} is no share")).hint("a share lies between 0 and 1: 0.05 is 5 %"))
        }
        value => Ok(value),
    }
}

fn show(ruling: &Ruling, console: Console) {
    if ruling.arms.len() > 1 {
        for arm in &ruling.arms {
            console.say(format!("{:<12} {}: {}", word(arm.outcome), arm.arm, arm.reason));
        }
    }
    console.say(format!("{}: {}", word(ruling.outcome), ruling.reason));
}

fn word(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Pass => "pass",
        Outcome::Fail => "fail",
        Outcome::Inconclusive => "inconclusive",
    }
}

/// The summary with this gate's answers in the place of the run's own.
fn ruled(mut summary: Summary, ruling: &Ruling) -> Summary {
    summary.verdict = ruling.outcome;
    summary.reason.clone_from(&ruling.reason);
    for (arm, decision) in summary.arms.iter_mut().zip(&ruling.arms) {
        arm.verdict = decision.outcome;
        arm.reason.clone_from(&decision.reason);
    }
    summary
}
