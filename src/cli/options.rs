//! The options that every command with a load shares.

use std::{cell::LazyCell, num::NonZeroUsize, path::PathBuf};

use clap::ValueEnum;

use crate::{
    error::{Error, Result},
    report::{csv, folder, html, junit, markdown, position, summary::Summary, tally::Tally},
    run::{Overrides, Plan},
    scenario::{Arrival, Parity, Span, UntilSpec},
    seed::Seed,
};

/// Which requests ask for a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StreamChoice {
    /// The scenario's share.
    Both,
    /// Every request.
    Always,
    /// No request.
    Never,
}

/// The sequential test that ends an arm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum UntilChoice {
    /// Wald's test has chosen between p0 and p1.
    Decided,
    /// A bound that holds at every look lies on one side of p1.
    Bounded,
}

/// An option given here overrides the file's default, never an arm's own value.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Sessions an arm
    #[arg(long, help_heading = "Load")]
    pub sessions: Option<u64>,
    /// Sessions in flight at once; several values make an axis
    #[arg(long, value_delimiter = ',', value_name = "N,…", help_heading = "Load")]
    pub concurrency: Vec<u32>,
    /// Rounds a session
    #[arg(long, help_heading = "Load")]
    pub rounds: Option<u32>,
    /// Seed of everything: a number or a commit hash
    #[arg(long, help_heading = "Load")]
    pub seed: Option<Seed>,
    /// Start sessions for this long instead of counting them
    #[arg(long, value_name = "TIME", help_heading = "Load")]
    pub duration: Option<Span>,
    /// Sessions started in this time are driven but not counted
    #[arg(long, value_name = "TIME", help_heading = "Load")]
    pub warmup: Option<Span>,
    /// Reach full concurrency over this time
    #[arg(long, value_name = "TIME", help_heading = "Load")]
    pub ramp: Option<Span>,
    /// When sessions start
    #[arg(long, value_enum, help_heading = "Load")]
    pub arrival: Option<Arrival>,
    /// Sessions a second, for open arrivals
    #[arg(long, value_name = "PER_SECOND", help_heading = "Load")]
    pub rate: Option<f64>,
    /// Limit of one whole request
    #[arg(long, value_name = "TIME", help_heading = "Load")]
    pub timeout: Option<Span>,
    /// Limit of silence inside a response
    #[arg(long, value_name = "TIME", help_heading = "Load")]
    pub stall_timeout: Option<Span>,
    /// Send a request again that got no response at all
    #[arg(long, value_name = "N", help_heading = "Load")]
    pub retries: Option<u32>,
    /// Share of rounds that are first cancelled in mid-answer
    #[arg(long, value_name = "SHARE", help_heading = "Load")]
    pub cancel_rate: Option<f64>,
    /// Make the whole run a function of its seeds (built-in target)
    #[arg(long, overrides_with = "no_lockstep", help_heading = "Load")]
    pub lockstep: bool,
    /// Let the engine run free
    #[arg(long, help_heading = "Load")]
    pub no_lockstep: bool,
    /// Which requests ask for a stream
    #[arg(long, value_enum, help_heading = "Load")]
    pub stream: Option<StreamChoice>,
    /// Ask every dictated turn again in other forms: is it the parser or the engine?
    #[arg(long, value_enum, value_name = "FORMS", help_heading = "Load")]
    pub parity: Option<Parity>,
    /// Members to add to every request body
    #[arg(long, value_name = "JSON", help_heading = "Target")]
    pub extra_body: Option<String>,
    /// Model name to ask for
    #[arg(long, help_heading = "Target")]
    pub model: Option<String>,
    /// Drive this server instead of the file's target, whose command, arguments and environment are not used
    #[arg(long, value_name = "URL", help_heading = "Target")]
    pub base_url: Option<String>,
    /// Name of the variable that holds the API key
    #[arg(long, value_name = "NAME", help_heading = "Target")]
    pub api_key_env: Option<String>,
    /// Corrupted sessions that an arm may have
    #[arg(long, value_name = "N", help_heading = "Gate")]
    pub max_corruption: Option<u64>,
    /// Largest upper bound of the session corruption rate
    #[arg(long, value_name = "SHARE", help_heading = "Gate")]
    pub max_upper: Option<f64>,
    /// Confidence of the bounds
    #[arg(long, value_name = "SHARE", help_heading = "Gate")]
    pub confidence: Option<f64>,
    /// Fewer judged sessions than this are inconclusive
    #[arg(long, value_name = "N", help_heading = "Gate")]
    pub min_sessions: Option<u64>,
    /// Drive one part of the sessions: `slice:1/4`
    #[arg(long, value_name = "slice:M/N", help_heading = "Run")]
    pub partition: Option<String>,
    /// Go on with an interrupted run: its result folder
    #[arg(long, value_name = "RESULT", help_heading = "Run")]
    pub resume: Option<PathBuf>,
    /// Stop each arm once a sequential test has decided (see --p0, --p1)
    #[arg(long, value_enum, value_name = "WHEN", help_heading = "Run")]
    pub until: Option<UntilChoice>,
    /// Corruption rate that is good enough, for --until
    #[arg(long, value_name = "SHARE", default_value_t = 0.005, requires = "until", help_heading = "Run")]
    pub p0: f64,
    /// Corruption rate that is not, for --until
    #[arg(long, value_name = "SHARE", default_value_t = 0.05, requires = "until", help_heading = "Run")]
    pub p1: f64,
    /// Share of false alarms and of misses, for --until
    #[arg(long, value_name = "SHARE", default_value_t = 0.05, requires = "until", help_heading = "Run")]
    pub alpha: f64,
    /// Launches side by side; one core each is the default where a launch is a function of its seeds
    #[arg(long, value_name = "N", help_heading = "Run")]
    pub jobs: Option<NonZeroUsize>,
    /// Let the harness prove itself first: a short self-check, and no run where it fails
    #[arg(long, help_heading = "Run")]
    pub selfcheck: bool,
    /// Resolve and print the plan, send nothing
    #[arg(long, help_heading = "Run")]
    pub dry_run: bool,
    /// Where result folders go
    #[arg(long, value_name = "DIR", default_value = "results", help_heading = "Output")]
    pub output_dir: PathBuf,
    /// Copies of the reports
    #[command(flatten)]
    pub exports: Exports,
    /// Exit with 125 instead of 2 and 3, so that `git bisect run` skips
    #[arg(long, help_heading = "Output")]
    pub git_bisect_codes: bool,
}

/// Copies of the reports at paths of the caller's choice.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Output")]
pub struct Exports {
    /// Write the summary as JSON
    #[arg(long, value_name = "FILE")]
    pub export_json: Option<PathBuf>,
    /// Write one CSV row an arm
    #[arg(long, value_name = "FILE")]
    pub export_csv: Option<PathBuf>,
    /// Write the table as Markdown
    #[arg(long, value_name = "FILE")]
    pub export_markdown: Option<PathBuf>,
    /// Write one JUnit test case an arm
    #[arg(long, value_name = "FILE")]
    pub export_junit: Option<PathBuf>,
    /// Write the self-contained page
    #[arg(long, value_name = "FILE")]
    pub export_html: Option<PathBuf>,
}

impl Options {
    /// What the flags say over a file's defaults.
    pub fn overrides(&self) -> Overrides {
        Overrides {
            sessions: self.sessions,
            concurrency: self.concurrency.clone(),
            rounds: self.rounds,
            seed: self.seed,
            duration: self.duration,
            warmup: self.warmup,
            ramp: self.ramp,
            arrival: self.arrival,
            rate: self.rate,
            timeout: self.timeout,
            stall_timeout: self.stall_timeout,
            retries: self.retries,
            cancel: self.cancel_rate,
            lockstep: self.wants_lockstep(),
            stream: self.stream.and_then(StreamChoice::share),
            parity: self.parity,
            extra_body: self.extra_body.clone(),
            model: self.model.clone(),
            base_url: self.base_url.clone(),
            api_key_env: self.api_key_env.clone(),
            max_corruption: self.max_corruption,
            max_upper: self.max_upper,
            confidence: self.confidence,
            min_sessions: self.min_sessions,
            partition: self.partition.clone(),
            until: self.until.map(|choice| match choice {
                UntilChoice::Decided => {
                    UntilSpec::Sprt { p0: self.p0, p1: self.p1, alpha: self.alpha, beta: self.alpha }
                }
                UntilChoice::Bounded => UntilSpec::AlwaysValid { limit: self.p1, confidence: 1.0 - self.alpha },
            }),
        }
    }

    /// Refuses flags that `command` has no use for, beside those of `more`, each with whether it was given.
    pub fn refuse(&self, command: &str, more: &[(&str, bool)]) -> Result<()> {
        let flags = [("--export-…", self.exports.paths().next().is_some())];
        match flags.iter().chain(more).find(|(_, given)| *given) {
            Some((flag, _)) => Err(Error::usage(format!("{flag}: `{command}` has no use for it")).hint("leave it out")),
            None => Ok(()),
        }
    }

    /// Whether lockstep was asked for or declined; `None` leaves it to the file.
    fn wants_lockstep(&self) -> Option<bool> {
        match (self.lockstep, self.no_lockstep) {
            (true, _) => Some(true),
            (false, true) => Some(false),
            (false, false) => None,
        }
    }
}

/// Checks a confidence given on the command line.
pub fn confidence(value: Option<f64>) -> crate::error::Result<Option<f64>> {
    match value {
        Some(value) if !(value > 0.0 && value < 1.0) => {
            let error = crate::error::Error::usage(format!("--confidence {value} is no confidence"));
            Err(error.hint("it lies between 0 and 1: 0.95"))
        }
        value => Ok(value),
    }
}

impl StreamChoice {
    fn share(self) -> Option<f64> {
        match self {
            Self::Both => None,
            Self::Always => Some(1.0),
            Self::Never => Some(0.0),
        }
    }
}

impl Exports {
    fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        let Self { export_json, export_csv, export_markdown, export_junit, export_html } = self;
        [export_json, export_csv, export_markdown, export_junit, export_html].into_iter().flatten()
    }

    /// Refuses two copies at one path, of which the second would replace the first.
    pub fn check(&self) -> Result<()> {
        let paths: Vec<_> = self.paths().collect();
        match paths.iter().enumerate().find(|(place, path)| paths[..*place].contains(path)) {
            Some((_, path)) => Err(Error::usage(format!("two reports are to be written to {}", path.display()))
                .hint("give every --export-… its own path")),
            None => Ok(()),
        }
    }

    /// Writes the copies that were asked for.
    pub fn write(&self, plan: &Plan, tally: &Tally, summary: &Summary) -> Result<()> {
        let positions = LazyCell::new(|| position::of_run(tally, summary));
        if let Some(path) = &self.export_json {
            folder::put(path, &folder::pretty(summary))?;
        }
        if let Some(path) = &self.export_csv {
            folder::put(path, &csv::render(summary)?)?;
        }
        if let Some(path) = &self.export_markdown {
            folder::put(path, &markdown::render(summary, &positions))?;
        }
        if let Some(path) = &self.export_junit {
            folder::put(path, &junit::render(summary)?)?;
        }
        if let Some(path) = &self.export_html {
            folder::put(path, &html::render(plan, tally, summary, &positions)?)?;
        }
        Ok(())
    }
}
