//! Parse, resolve, run, exit; nothing else.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(toolstorm::cli::main())
}
