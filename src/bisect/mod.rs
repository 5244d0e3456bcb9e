//! Finds the smallest set of toggles that turns a good configuration into a bad one, under noise.
