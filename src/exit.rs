//! Every exit code of the binary, one documented constant each.

/// The run passed: every arm met what is expected of it.
pub const PASS: u8 = 0;
/// The gate failed (corruption above the allowance), or hazards were found.
pub const FAIL: u8 = 1;
/// Usage or set-up error: a bad file or flag, or a server that did not start.
pub const USAGE: u8 = 2;
/// Inconclusive or incomplete: too few sessions for the bound, too many transport errors, or interrupted.
pub const INCONCLUSIVE: u8 = 3;
/// What `--git-bisect-codes` maps [`USAGE`] and [`INCONCLUSIVE`] to, so that `git bisect run` skips the commit.
pub const GIT_BISECT_SKIP: u8 = 125;
