//! The prefix cache: full pages of finished sequences, kept for requests that resend the same tokens.
//!
//! A tree: a node is a page, its key the page's tokens, its parent the page before it, so a page is found only behind
//! exactly the tokens it was computed behind. Entries are compared token by token: there are no hash collisions.

use std::{collections::BTreeMap, rc::Rc};

use super::{PAGE_TOKENS, pages::Lease};
use crate::engine::tokenizer::Token;

type Tokens = Box<[Token]>;

#[derive(Debug)]
struct Node {
    parent: Option<usize>,
    tokens: Tokens,
    page: Rc<Lease>,
    children: BTreeMap<Tokens, usize>,
    /// When it was last used, in lookups and insertions.
    used: u64,
}

impl Node {
    /// Whether only the cache holds the page.
    fn is_idle(&self) -> bool {
        Rc::strong_count(&self.page) == 1
    }
}

/// Full pages by the tokens they hold and follow.
#[derive(Debug, Default)]
pub struct PrefixCache {
    roots: BTreeMap<Tokens, usize>,
    nodes: Vec<Option<Node>>,
    vacant: Vec<usize>,
    clock: u64,
}

impl PrefixCache {
    /// The nodes of the longest cached prefix of `tokens`.
    fn path(&self, tokens: &[Token]) -> Vec<usize> {
        let mut path = Vec::new();
        for page in tokens.chunks_exact(PAGE_TOKENS as usize) {
            let children = path.last().map_or(&self.roots, |last| &self.node(*last).children);
            let Some(found) = children.get(page) else { break };
            path.push(*found);
        }
        path
    }

    /// The pages of the longest cached prefix of `tokens`, marked as used.
    pub fn lookup(&mut self, tokens: &[Token]) -> Vec<Rc<Lease>> {
        let path = self.path(tokens);
        self.touch(&path);
        path.into_iter().map(|at| Rc::clone(&self.node(at).page)).collect()
    }

    /// How many pages of the cached prefix of `tokens` a running sequence holds.
    pub fn busy(&self, tokens: &[Token]) -> u32 {
        self.path(tokens).into_iter().filter(|at| !self.node(*at).is_idle()).count() as u32
    }

    /// Keeps the full pages of `tokens`; `page` gives the lease of each by its index. Pages known already are not kept
    /// twice.
    pub fn insert(&mut self, tokens: &[Token], page: impl Fn(usize) -> Rc<Lease>) {
        let mut path = Vec::new();
        for (index, tokens) in tokens.chunks_exact(PAGE_TOKENS as usize).enumerate() {
            let parent = path.last().copied();
            let known = self.children(parent).get(tokens).copied();
            path.push(known.unwrap_or_else(|| self.add(parent, tokens.into(), page(index))));
        }
        self.touch(&path);
    }

    /// Returns the least recently used page that nobody holds and no cached page follows; false when there is none.
    pub fn evict(&mut self) -> bool {
        let leaves = self.nodes.iter().enumerate().filter_map(|(at, node)| Some((at, node.as_ref()?)));
        let idle = leaves.filter(|(_, node)| node.children.is_empty() && node.is_idle());
        let Some((oldest, _)) = idle.min_by_key(|(at, node)| (node.used, *at)) else { return false };
        self.remove(oldest);
        true
    }

    /// Pages that only the cache holds. All of them can be evicted: whoever holds a page holds those before it.
    pub fn idle(&self) -> u32 {
        self.nodes.iter().flatten().filter(|node| node.is_idle()).count() as u32
    }

    /// Cached pages.
    pub fn len(&self) -> u32 {
        (self.nodes.len() - self.vacant.len()) as u32
    }

    /// Whether nothing is cached.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn node(&self, at: usize) -> &Node {
        self.nodes[at].as_ref().expect("paths lead to nodes")
    }

    fn children(&mut self, parent: Option<usize>) -> &mut BTreeMap<Tokens, usize> {
        match parent {
            Some(at) => &mut self.nodes[at].as_mut().expect("paths lead to nodes").children,
            None => &mut self.roots,
        }
    }

    fn add(&mut self, parent: Option<usize>, tokens: Tokens, page: Rc<Lease>) -> usize {
        let node = Node { parent, tokens: tokens.clone(), page, children: BTreeMap::new(), used: 0 };
        let at = self.vacant.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            self.nodes.len() - 1
        });
        self.nodes[at] = Some(node);
        self.children(parent).insert(tokens, at);
        at
    }

    fn remove(&mut self, at: usize) {
        let node = self.nodes[at].take().expect("only nodes are removed");
        self.children(node.parent).remove(&node.tokens);
        self.vacant.push(at);
    }

    /// Marks a path as used now, its end first: of pages used together the deeper ones go first.
    fn touch(&mut self, path: &[usize]) {
        for at in path.iter().rev() {
            self.clock += 1;
            let now = self.clock;
            self.nodes[*at].as_mut().expect("paths lead to nodes").used = now;
        }
    }
}
