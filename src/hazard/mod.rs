//! Happens-before analysis of captured graphs: capture to hazards.
