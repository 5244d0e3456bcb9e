//! Statistics of rare events: intervals, exact tests, sequential tests, power. Pure; imports nothing of ours.
