//! The gate: a finished run to pass, fail or inconclusive.
