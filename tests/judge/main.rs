//! The judge against recorded failures, in every chunking, and against its own limits.

mod cases;
