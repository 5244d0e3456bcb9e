//! In which order ready ops run.
