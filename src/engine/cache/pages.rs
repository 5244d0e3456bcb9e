//! The page pool: a lease is a page, and dropping the lease returns it.

use std::{cell::RefCell, rc::Rc};

/// The page that padded rows write and nobody ever leases.
pub const PADDING_PAGE: u32 = 0;

/// A fixed number of pages, leased one at a time.
#[derive(Debug, Clone)]
pub struct PagePool {
    free: Rc<RefCell<FreePages>>,
}

#[derive(Debug)]
struct FreePages {
    /// The page returned last is leased next.
    stack: Vec<u32>,
    leased: Vec<bool>,
}

/// A leased page, returned to its pool on drop.
#[must_use = "a lease that is not kept returns its page at once"]
#[derive(Debug)]
pub struct Lease {
    page: u32,
    free: Rc<RefCell<FreePages>>,
}

impl PagePool {
    /// A pool of `pages` pages beside [`PADDING_PAGE`]: they are numbered from 1.
    pub fn new(pages: u32) -> Self {
        let free = FreePages { stack: (1..=pages).rev().collect(), leased: vec![false; pages as usize + 1] };
        Self { free: Rc::new(RefCell::new(free)) }
    }

    /// A page nobody holds, or `None` when all are leased.
    pub fn lease(&self) -> Option<Lease> {
        let mut free = self.free.borrow_mut();
        let page = free.stack.pop()?;
        assert!(!std::mem::replace(&mut free.leased[page as usize], true), "page {page} handed out twice");
        Some(Lease { page, free: Rc::clone(&self.free) })
    }

    /// Pages that nobody holds.
    pub fn available(&self) -> u32 {
        self.free.borrow().stack.len() as u32
    }

    /// All pages that can be leased.
    pub fn capacity(&self) -> u32 {
        self.free.borrow().leased.len() as u32 - 1
    }
}

impl Lease {
    /// The number of the page.
    pub fn page(&self) -> u32 {
        self.page
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut free = self.free.borrow_mut();
        assert!(std::mem::replace(&mut free.leased[self.page as usize], false), "page {} returned twice", self.page);
        free.stack.push(self.page);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_padding_page_is_never_leased_and_all_others_are() {
        let pool = PagePool::new(5);
        let leases: Vec<_> = std::iter::from_fn(|| pool.lease()).collect();
        let mut pages: Vec<_> = leases.iter().map(Lease::page).collect();
        pages.sort_unstable();
        assert_eq!(pages, [1, 2, 3, 4, 5]);
        assert_eq!((pool.available(), pool.capacity()), (0, 5));
    }

    #[test]
    fn a_dropped_lease_returns_its_page() {
        let pool = PagePool::new(2);
        let first = pool.lease().unwrap();
        let page = first.page();
        drop(first);
        assert_eq!(pool.available(), 2);
        assert_eq!(pool.lease().unwrap().page(), page);
    }
}
