//! The analyser against truth: real captures, golden graphs, brute force, and the engine's own races.

mod captures;
