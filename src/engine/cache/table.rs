//! A sequence's pages, in order of its positions.

use std::rc::Rc;

use super::{PAGE_TOKENS, pages::Lease};

/// The pages of one sequence: a shared prefix, then its own. Dropping it returns those that nobody else holds.
#[derive(Debug)]
pub struct Table {
    leases: Vec<Rc<Lease>>,
    numbers: Vec<u32>,
    /// Tokens at the start that were served by the prefix cache.
    cached: u32,
    window: Lease,
}

impl Table {
    pub(super) fn new(shared: Vec<Rc<Lease>>, own: Vec<Lease>, window: Lease) -> Self {
        let cached = shared.len() as u32 * PAGE_TOKENS;
        let leases: Vec<_> = shared.into_iter().chain(own.into_iter().map(Rc::new)).collect();
        let numbers = leases.iter().map(|lease| lease.page()).collect();
        Self { leases, numbers, cached, window }
    }

    /// The page of each run of [`PAGE_TOKENS`] positions.
    pub fn pages(&self) -> &[u32] {
        &self.numbers
    }

    /// The page of the sliding window's ring.
    pub fn window(&self) -> u32 {
        self.window.page()
    }

    /// Tokens at the start whose entries were there already.
    pub fn cached(&self) -> u32 {
        self.cached
    }

    pub(super) fn lease(&self, index: usize) -> Rc<Lease> {
        Rc::clone(&self.leases[index])
    }
}
