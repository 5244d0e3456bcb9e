//! What a capture recorded: ops, edges, lifetimes.
