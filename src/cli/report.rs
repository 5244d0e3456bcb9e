//! `toolstorm report`: a result, rendered again from its journal.

use std::path::PathBuf;

use super::options::Exports;
use crate::{
    error::Result,
    exit, gate,
    report::{folder::Folder, measure, table, tally::Tally, terminal::Console},
};

/// Arguments of `report`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Result folder
    result: PathBuf,
    #[command(flatten)]
    exports: Exports,
}

/// Runs `report`: writes the folder's reports anew, the copies that are asked for, and prints the table.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    args.exports.check()?;
    let folder = Folder::open(&args.result)?;
    let tally = Tally::of(&folder.events()?);
    let summary = gate::settle(measure::summary(folder.plan(), &tally, Some(&folder.path)), &folder.plan().gate)?;
    folder.write(&tally, &summary)?;
    args.exports.write(folder.plan(), &tally, &summary)?;
    console.say(table::render(&summary, console).trim_end());
    console.emit(&summary);
    Ok(exit::PASS)
}
