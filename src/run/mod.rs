//! A run: plan, arms, launches, journal, resume.
