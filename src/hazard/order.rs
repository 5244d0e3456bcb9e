//! Who happens before whom: vector clocks over a decomposition of the graph into chains, `O((N + E) · chains)`.
//!
//! A chain is a sequence of nodes in which each is ordered before the next; a stream is one. For a foreign graph, whose
//! streams are not recorded, a node joins any chain whose tail is among its ancestors, which keeps the number of chains
//! near the number of streams the program used, also over many forks and joins.

use std::{cmp::Reverse, collections::BinaryHeap};

use crate::error::{Error, Result};

/// Largest clock table, in entries (4 bytes each): wider graphs are refused instead of exhausting memory.
const CLOCK_LIMIT: usize = 1 << 28;

/// The happens-before order of one graph.
#[derive(Debug, Clone)]
pub struct Order {
    topological: Vec<u32>,
    chain: Vec<u32>,
    position: Vec<u32>,
    offsets: Vec<usize>,
    clocks: Vec<u32>,
    chains: u32,
}

impl Order {
    /// Orders `nodes` nodes by `edges`; `streams` gives each node's stream, where it is known.
    pub fn new(streams: &[Option<u32>], edges: &[(u32, u32)]) -> Result<Self> {
        let graph = Adjacency::new(streams.len(), edges)?;
        let topological = graph.topological()?;
        let mut order = Self {
            chain: vec![0; streams.len()],
            position: vec![0; streams.len()],
            offsets: vec![0; streams.len() + 1],
            clocks: Vec::new(),
            chains: 0,
            topological,
        };
        order.stamp(&graph, streams)?;
        Ok(order)
    }

    fn stamp(&mut self, graph: &Adjacency, streams: &[Option<u32>]) -> Result<()> {
        let mut tails: Vec<u32> = Vec::new();
        let mut row: Vec<u32> = Vec::new();
        let mut spans = vec![(0_usize, 0_usize); streams.len()];
        for index in 0..self.topological.len() {
            let node = self.topological[index];
            row.clear();
            row.resize(tails.len(), 0);
            for &before in graph.before(node) {
                let (start, end) = spans[before as usize];
                for (mine, theirs) in row.iter_mut().zip(&self.clocks[start..end]) {
                    *mine = (*mine).max(*theirs);
                }
            }
            let chain = self.choose(node, &row, &tails, graph, streams);
            if chain == tails.len() {
                tails.push(node);
                row.push(1);
            } else {
                row[chain] = self.position[tails[chain] as usize] + 1;
                tails[chain] = node;
            }
            if self.clocks.len() + row.len() > CLOCK_LIMIT {
                return Err(Error::usage(format!(
                    "the graph has more than {} parallel chains over {} nodes, too wide to analyse",
                    tails.len(),
                    streams.len()
                ))
                .hint("capture fewer independent branches at once"));
            }
            self.chain[node as usize] = chain as u32;
            self.position[node as usize] = row[chain];
            let start = self.clocks.len();
            self.clocks.extend_from_slice(&row);
            spans[node as usize] = (start, self.clocks.len());
        }
        self.chains = tails.len() as u32;
        self.pack(&spans);
        Ok(())
    }

    /// Rows were written in topological order; keep where each node's row starts and how long it is.
    fn pack(&mut self, spans: &[(usize, usize)]) {
        let mut clocks = Vec::with_capacity(self.clocks.len());
        for (node, &(start, end)) in spans.iter().enumerate() {
            self.offsets[node] = clocks.len();
            clocks.extend_from_slice(&self.clocks[start..end]);
        }
        self.offsets[spans.len()] = clocks.len();
        self.clocks = clocks;
    }

    fn choose(&self, node: u32, row: &[u32], tails: &[u32], graph: &Adjacency, streams: &[Option<u32>]) -> usize {
        let stream = streams[node as usize];
        let open = |chain: usize| self.position[tails[chain] as usize] == row[chain];
        let same = |chain: usize| streams[tails[chain] as usize] == stream;
        if stream.is_some() {
            return (0..tails.len()).find(|&c| same(c) && open(c)).unwrap_or(tails.len());
        }
        let direct = graph
            .before(node)
            .iter()
            .map(|&before| self.chain[before as usize] as usize)
            .filter(|&c| same(c) && open(c) && graph.before(node).contains(&tails[c]))
            .min();
        direct.or_else(|| (0..tails.len()).find(|&c| same(c) && open(c))).unwrap_or(tails.len())
    }

    /// True when some path leads from `a` to `b`.
    pub fn before(&self, a: u32, b: u32) -> bool {
        a != b && self.clock(b, self.chain[a as usize]) >= self.position[a as usize]
    }

    /// True when a path orders the two, either way.
    pub fn ordered(&self, a: u32, b: u32) -> bool {
        a == b || self.before(a, b) || self.before(b, a)
    }

    /// The last position on `chain` that is ordered before (or is) `node`; positions start at 1.
    pub fn clock(&self, node: u32, chain: u32) -> u32 {
        let start = self.offsets[node as usize];
        let row = &self.clocks[start..self.offsets[node as usize + 1]];
        row.get(chain as usize).copied().unwrap_or(0)
    }

    /// The chain that `node` lies on.
    pub fn chain(&self, node: u32) -> u32 {
        self.chain[node as usize]
    }

    /// The place of `node` on its chain, from 1.
    pub fn position(&self, node: u32) -> u32 {
        self.position[node as usize]
    }

    /// Number of chains.
    pub fn chains(&self) -> u32 {
        self.chains
    }

    /// All nodes, each after everything ordered before it.
    pub fn topological(&self) -> &[u32] {
        &self.topological
    }
}

/// Predecessors of every node, packed.
struct Adjacency {
    offsets: Vec<u32>,
    before: Vec<u32>,
    after_offsets: Vec<u32>,
    after: Vec<u32>,
}

impl Adjacency {
    fn new(nodes: usize, edges: &[(u32, u32)]) -> Result<Self> {
        for &(a, b) in edges {
            if a as usize >= nodes || b as usize >= nodes {
                return Err(Error::usage(format!("edge [{a}, {b}] names a node beyond the {nodes} of the graph")));
            }
            if a == b {
                return Err(Error::usage(format!("edge [{a}, {b}] leads from a node to itself")));
            }
        }
        let (offsets, before) = pack(nodes, edges.iter().map(|&(a, b)| (b, a)));
        let (after_offsets, after) = pack(nodes, edges.iter().copied());
        Ok(Self { offsets, before, after_offsets, after })
    }

    fn before(&self, node: u32) -> &[u32] {
        &self.before[self.offsets[node as usize] as usize..self.offsets[node as usize + 1] as usize]
    }

    fn after(&self, node: u32) -> &[u32] {
        &self.after[self.after_offsets[node as usize] as usize..self.after_offsets[node as usize + 1] as usize]
    }

    fn topological(&self) -> Result<Vec<u32>> {
        let nodes = self.offsets.len() - 1;
        let mut missing: Vec<u32> = (0..nodes as u32).map(|n| self.before(n).len() as u32).collect();
        let mut ready: BinaryHeap<Reverse<u32>> =
            (0..nodes as u32).filter(|&n| missing[n as usize] == 0).map(Reverse).collect();
        let mut sorted = Vec::with_capacity(nodes);
        while let Some(Reverse(node)) = ready.pop() {
            sorted.push(node);
            for &next in self.after(node) {
                missing[next as usize] -= 1;
                if missing[next as usize] == 0 {
                    ready.push(Reverse(next));
                }
            }
        }
        if sorted.len() < nodes {
            return Err(Error::usage("the edges form a cycle, so this is no captured graph"));
        }
        Ok(sorted)
    }
}

fn pack(nodes: usize, pairs: impl Iterator<Item = (u32, u32)> + Clone) -> (Vec<u32>, Vec<u32>) {
    let mut offsets = vec![0_u32; nodes + 1];
    for (from, _) in pairs.clone() {
        offsets[from as usize + 1] += 1;
    }
    for node in 0..nodes {
        offsets[node + 1] += offsets[node];
    }
    let mut next = offsets.clone();
    let mut packed = vec![0_u32; offsets[nodes] as usize];
    for (from, to) in pairs {
        packed[next[from as usize] as usize] = to;
        next[from as usize] += 1;
    }
    (offsets, packed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seed::Seed;
    use rand::RngExt;

    /// Reachability by search from every node: slow, and obviously right.
    fn search(nodes: usize, edges: &[(u32, u32)]) -> Vec<Vec<bool>> {
        let mut reached = vec![vec![false; nodes]; nodes];
        for (start, reached) in reached.iter_mut().enumerate() {
            let mut stack = vec![start];
            while let Some(node) = stack.pop() {
                for &(_, b) in edges.iter().filter(|e| e.0 as usize == node) {
                    if !std::mem::replace(&mut reached[b as usize], true) {
                        stack.push(b as usize);
                    }
                }
            }
        }
        reached
    }

    #[test]
    fn agrees_with_path_search_on_random_graphs() {
        let (mut ordered, mut unordered) = (0, 0);
        for case in 0..60 {
            let mut rng = Seed(case).rng();
            let nodes = rng.random_range(2..40_usize);
            let named = rng.random_bool(0.5);
            let streams: Vec<Option<u32>> = (0..nodes).map(|_| named.then(|| rng.random_range(0..4_u32))).collect();
            let mut edges: Vec<(u32, u32)> = (0..rng.random_range(0..nodes * 2))
                .map(|_| {
                    let b = rng.random_range(1..nodes as u32);
                    (rng.random_range(0..b), b)
                })
                .collect();
            if named {
                for b in 0..nodes {
                    if let Some(a) = (0..b).rev().find(|&a| streams[a] == streams[b]) {
                        edges.push((a as u32, b as u32));
                    }
                }
            }
            let truth = search(nodes, &edges);
            let order = Order::new(&streams, &edges).expect("an acyclic graph");
            for (a, row) in truth.iter().enumerate() {
                for (b, &reached) in row.iter().enumerate() {
                    assert_eq!(order.before(a as u32, b as u32), reached, "case {case}: {a} before {b}");
                    ordered += u32::from(reached);
                    unordered += u32::from(a < b && !reached && !truth[b][a]);
                }
            }
        }
        assert!(ordered > 1000 && unordered > 1000, "{ordered} ordered and {unordered} unordered pairs: too few");
    }

    #[test]
    fn forks_and_joins_need_few_chains() {
        // Three side branches between each fork and join, a hundred times over.
        let mut edges = Vec::new();
        for layer in 0..100_u32 {
            let base = layer * 5;
            for side in 1..=3 {
                edges.push((base, base + side));
                edges.push((base + side, base + 4));
            }
            edges.push((base + 4, base + 5));
        }
        let order = Order::new(&[None; 501], &edges).expect("an acyclic graph");
        assert_eq!(order.chains(), 3);
    }

    #[test]
    fn refuses_cycles_and_foreign_nodes() {
        assert!(Order::new(&[None; 2], &[(0, 1), (1, 0)]).unwrap_err().to_string().contains("cycle"));
        assert!(Order::new(&[None; 2], &[(0, 2)]).unwrap_err().to_string().contains("beyond"));
        assert!(Order::new(&[None; 2], &[(1, 1)]).unwrap_err().to_string().contains("itself"));
    }
}
