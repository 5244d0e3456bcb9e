//! A memory for kernel tests.
