//! What the virtual GPU counts.

/// Totals since the device was made. Times are nanoseconds of the device's clock, virtual on the virtual GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Drained programs: a graph launch, or eager work up to a synchronisation.
    pub launches: u64,
    /// Time from each program's start to its end, summed.
    pub total_ns: u64,
    /// Time in which at least one stream had an op running.
    pub busy_ns: u64,
    /// Time in which at least two streams had an op running.
    pub overlap_ns: u64,
    /// Blocks run.
    pub blocks: u64,
    /// Race hits logged.
    pub race_hits: u64,
    /// Ops whose blocks were executed one by one because a conflicting op ran at the same time.
    pub sliced_ops: u64,
}

impl Stats {
    /// Share of the busy time in which two or more streams were active.
    pub fn overlap_share(&self) -> f64 {
        if self.busy_ns == 0 { 0.0 } else { self.overlap_ns as f64 / self.busy_ns as f64 }
    }

    /// Adds what was counted elsewhere.
    pub fn add(&mut self, other: &Self) {
        self.launches += other.launches;
        self.total_ns += other.total_ns;
        self.busy_ns += other.busy_ns;
        self.overlap_ns += other.overlap_ns;
        self.blocks += other.blocks;
        self.race_hits += other.race_hits;
        self.sliced_ops += other.sliced_ops;
    }

    /// What was counted since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            launches: self.launches - earlier.launches,
            total_ns: self.total_ns - earlier.total_ns,
            busy_ns: self.busy_ns - earlier.busy_ns,
            overlap_ns: self.overlap_ns - earlier.overlap_ns,
            blocks: self.blocks - earlier.blocks,
            race_hits: self.race_hits - earlier.race_hits,
            sliced_ops: self.sliced_ops - earlier.sliced_ops,
        }
    }
}
