//! The command line: one file per command; arguments to a validated plan, nothing else.

mod bisect;
mod compare;
mod examples;
mod execute;
mod gate;
mod hazards;
mod history;
mod matrix;
mod merge;
pub mod options;
mod plan;
mod replay;
mod report;
mod run;
mod selfcheck;
mod serve;
mod supervise;
mod validate;

use clap::{Parser, Subcommand};

use crate::{
    error::Result,
    exit,
    gate::git_bisect_code,
    report::terminal::{Color, Console, unprinted},
};

/// Load generator, judge and hazard analyser for tool calls that break only under load.
#[derive(Debug, Parser)]
#[command(name = "toolstorm", version, max_term_width = 100, disable_help_subcommand = true)]
struct Cli {
    #[command(flatten)]
    speech: Speech,
    #[command(subcommand)]
    command: Command,
}

/// How the command speaks; common to all commands.
#[derive(Debug, clap::Args)]
struct Speech {
    /// Print the machine form on stdout and nothing else there
    #[arg(long, global = true, help_heading = "Output")]
    json: bool,
    /// No progress and no notes
    #[arg(long, short, global = true, help_heading = "Output")]
    quiet: bool,
    /// When to colour
    #[arg(long, global = true, value_enum, default_value_t, value_name = "WHEN", help_heading = "Output")]
    color: Color,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// One configuration, one report
    #[command(after_help = examples::RUN)]
    Run(run::Args),
    /// Every arm of an A/B matrix, interleaved, one report
    #[command(after_help = examples::MATRIX)]
    Matrix(matrix::Args),
    /// Verdict on a finished run; the exit code is the answer
    #[command(after_help = examples::GATE)]
    Gate(gate::Args),
    /// Two results or arms: difference, interval, exact p
    #[command(after_help = examples::COMPARE)]
    Compare(compare::Args),
    /// Smallest set of toggles that turns good into bad, under noise
    #[command(after_help = examples::BISECT)]
    Bisect(bisect::Args),
    /// Cells, sessions, requests, expected time, power; sends nothing
    #[command(after_help = examples::PLAN)]
    Plan(plan::Args),
    /// Happens-before analysis of captured graphs
    #[command(after_help = examples::HAZARDS)]
    Hazards(hazards::Args),
    /// The built-in engine as an OpenAI-compatible server
    #[command(after_help = examples::SERVE, after_long_help = serve::long_help())]
    Serve(serve::Args),
    /// A server with known faults, at full load: recall and false positives of the harness itself
    #[command(after_help = examples::SELFCHECK)]
    Selfcheck(selfcheck::Args),
    /// Resend a failing session's exact requests, rejudge its recorded bytes, or replay a schedule token
    #[command(after_help = examples::REPLAY)]
    Replay(replay::Args),
    /// Classify recorded responses or transcripts offline
    #[command(after_help = examples::VALIDATE)]
    Validate(validate::Args),
    /// Render a result again: html, markdown, csv, json, junit
    #[command(after_help = examples::REPORT)]
    Report(report::Args),
    /// Trend over past results, drift test
    #[command(after_help = examples::HISTORY)]
    History(history::Args),
    /// Join the partitions of one run
    #[command(after_help = examples::MERGE)]
    Merge(merge::Args),
    /// Runs a server and ends it when the harness is gone
    #[command(hide = true)]
    Supervise(supervise::Args),
}

/// Runs the command named by the process's arguments and returns its exit code (see [`crate::exit`]).
pub fn main() -> u8 {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version also come as an error; printing fails only when the reader went away.
            let _ = error.print();
            let skips = std::env::args_os().any(|argument| argument == "--git-bisect-codes");
            let code = if error.use_stderr() { exit::USAGE } else { exit::PASS };
            return if skips { git_bisect_code(code) } else { code };
        }
    };
    let console = Console { json: cli.speech.json, quiet: cli.speech.quiet, color: cli.speech.color };
    let code = dispatch(&cli.command, console).and_then(|code| unprinted().map_or(Ok(code), Err));
    let code = code.unwrap_or_else(|error| {
        console.fail(&error);
        error.code()
    });
    if cli.command.git_bisect_codes() { git_bisect_code(code) } else { code }
}

impl Command {
    /// Whether the exit code is to be one that `git bisect run` understands.
    fn git_bisect_codes(&self) -> bool {
        match self {
            Self::Run(args) => args.options.git_bisect_codes,
            Self::Matrix(args) => args.options.git_bisect_codes,
            Self::Bisect(args) => args.options.git_bisect_codes,
            Self::Plan(args) => args.options.git_bisect_codes,
            Self::Gate(args) => args.git_bisect_codes,
            _ => false,
        }
    }
}

fn dispatch(command: &Command, console: Console) -> Result<u8> {
    match command {
        Command::Run(args) => run::run(args, console),
        Command::Matrix(args) => matrix::run(args, console),
        Command::Gate(args) => gate::run(args, console),
        Command::Compare(args) => compare::run(args, console),
        Command::Bisect(args) => bisect::run(args, console),
        Command::Plan(args) => plan::run(args, console),
        Command::Hazards(args) => hazards::run(args, console),
        Command::Serve(args) => serve::run(args, console),
        Command::Selfcheck(args) => selfcheck::run(args, console),
        Command::Replay(args) => replay::run(args, console),
        Command::Validate(args) => validate::run(args, console),
        Command::Report(args) => report::run(args, console),
        Command::History(args) => history::run(args, console),
        Command::Merge(args) => merge::run(args, console),
        Command::Supervise(args) => supervise::run(args),
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::{Cli, examples};

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_example_parses_and_every_command_has_one() {
        for line in examples::LINES {
            assert!(Cli::try_parse_from(line.split(' ')).is_ok(), "`{line}` does not parse");
        }
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains(&format!("toolstorm {}", command.get_name())), "`{}` has none", command.get_name());
        }
    }
}
