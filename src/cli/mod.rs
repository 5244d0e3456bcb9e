//! The command line: one file per command; arguments to a validated plan, nothing else.

mod bisect;
mod compare;
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
    Run(run::Args),
    /// Every arm of an A/B matrix, interleaved, one report
    Matrix(matrix::Args),
    /// Verdict on a finished run; the exit code is the answer
    Gate(gate::Args),
    /// Two results or arms: difference, interval, exact p
    Compare(compare::Args),
    /// Smallest set of toggles that turns good into bad, under noise
    Bisect(bisect::Args),
    /// Cells, sessions, requests, expected time, power; sends nothing
    Plan(plan::Args),
    /// Happens-before analysis of captured graphs
    Hazards(hazards::Args),
    /// The built-in engine as an OpenAI-compatible server
    Serve(serve::Args),
    /// A server with known faults, at full load: recall and false positives of the harness itself
    Selfcheck(selfcheck::Args),
    /// Resend a failing session's exact requests, rejudge its recorded bytes, or replay a schedule token
    Replay(replay::Args),
    /// Classify recorded responses or transcripts offline
    Validate(validate::Args),
    /// Render a result again: html, markdown, csv, json, junit
    Report(report::Args),
    /// Trend over past results, drift test
    History(history::Args),
    /// Join the partitions of one run
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
            return if error.use_stderr() { exit::USAGE } else { exit::PASS };
        }
    };
    let console = Console { json: cli.speech.json, quiet: cli.speech.quiet, color: cli.speech.color };
    let code = dispatch(&cli.command, console).and_then(|code| unprinted().map_or(Ok(code), Err));
    code.unwrap_or_else(|error| {
        console.fail(&error);
        error.code()
    })
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
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
