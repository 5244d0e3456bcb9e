//! The analyser against truth: real captures, golden graphs, replays, the exporter, the engine's own races.

mod captures;
mod engine;
mod exporter;
mod folders;
mod golden;
mod inputs;
mod outputs;
mod replays;
mod runs;
