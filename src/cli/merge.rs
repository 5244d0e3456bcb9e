//! `toolstorm merge`: the partitions of one run, joined.

use std::path::{Path, PathBuf};

use crate::{
    clock::Clock,
    error::{Error, Result},
    gate,
    report::{folder::Folder, measure, table, tally::Tally, terminal::Console},
    run::{Consumer, Partition, Plan, RunEvent, journal::Journal},
};

/// Arguments of `merge`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Result folders
    #[arg(required = true)]
    results: Vec<PathBuf>,
    /// Where the joined result goes
    #[arg(long, value_name = "DIR", default_value = "results")]
    output_dir: PathBuf,
}

/// Runs `merge`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    let parts: Vec<_> = args.results.iter().map(|path| Folder::open(path)).collect::<Result<_>>()?;
    check(&parts)?;
    let lacking = lacking(&parts);
    if let Some(parts) = &lacking {
        console.warn(format!("the joined result is incomplete: {parts} not among the results"));
    }
    let events: Vec<Vec<RunEvent>> = parts.iter().map(Folder::events).collect::<Result<_>>()?;
    let plan = Plan { partition: None, ..parts[0].plan().clone() };
    let joined = Folder::create(&args.output_dir, plan, Clock::start())?;
    let mut journal = Journal::create(&joined.journal())?;
    let mut tally = Tally::default();
    let mut incomplete = lacking.is_some();
    for (part, events) in parts.iter().zip(&events) {
        let own = Tally::of(events);
        if !own.complete || own.launches.values().any(|launch| launch.failure.is_some()) {
            console.warn(format!("{} is itself incomplete: --resume goes on with it", part.path.display()));
            incomplete = true;
        }
        for event in events {
            journal.consume(event)?;
            tally.add(event);
        }
        copy(&part.path.join("evidence"), &joined.path.join("evidence"))?;
    }
    if incomplete {
        let end = RunEvent::RunEnded { interrupted: true, wall_ms: 0.0 };
        journal.consume(&end)?;
        tally.add(&end);
    }
    let summary = gate::settle(measure::summary(joined.plan(), &tally, Some(&joined.path)), &joined.plan().gate)?;
    joined.write(&tally, &summary)?;
    console.say(table::render(&summary, console).trim_end());
    console.emit(&summary);
    Ok(gate::exit_code(summary.verdict))
}

/// Refuses results that are not different parts of one plan.
fn check(parts: &[Folder]) -> Result<()> {
    let first = &parts[0];
    for (place, part) in parts.iter().enumerate() {
        let name = part.path.display();
        let Some(partition) = part.plan().partition else {
            return Err(
                Error::usage(format!("{name} is no partition")).hint("run the parts with --partition slice:1/4")
            );
        };
        if part.plan().sha256() != first.plan().sha256() {
            return Err(Error::usage(format!("{name} is of another plan than {}", first.path.display())));
        }
        if let Some([variable, one, two]) = first.differing(&part.manifest.inherited) {
            let first = first.path.display();
            return Err(Error::usage(format!("{variable} was {one} for {first} and {two} for {name}"))
                .hint("run the parts with the same variables"));
        }
        if parts[..place].iter().any(|other| other.plan().partition == Some(partition)) {
            return Err(Error::usage(format!("{name}: {partition} is given twice")));
        }
        if first.plan().partition.is_some_and(|other| other.of != partition.of) {
            return Err(Error::usage(format!("{name}: {partition} divides the run differently")));
        }
    }
    Ok(())
}

/// Which parts of the run are not among `parts`, in words.
fn lacking(parts: &[Folder]) -> Option<String> {
    let given: Vec<Partition> = parts.iter().filter_map(|part| part.plan().partition).collect();
    let of = given.first()?.of;
    let mut missing = (1..=of).map(|part| Partition { part, of }).filter(|wanted| !given.contains(wanted));
    let first = missing.next()?;
    Some(match of - given.len() as u64 {
        1 => format!("{first} is"),
        count => format!("{first} and {} more are", count - 1),
    })
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let failed = |error: std::io::Error| Error::usage(format!("{}: {error}", from.display()));
    if !from.is_dir() {
        return Ok(());
    }
    std::fs::create_dir_all(to).map_err(failed)?;
    for entry in std::fs::read_dir(from).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), &target).map_err(failed)?;
        }
    }
    Ok(())
}
