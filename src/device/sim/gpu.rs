//! The virtual GPU as a backend: what the host enqueued becomes programs, and programs run.

use std::{collections::BTreeMap, rc::Rc};

use super::{
    Kernels, Memory, RaceHit, Stats, View, Writes,
    cost::CostModel,
    data::{Data, Machine},
    memory::Scratch,
    order::{Order, Schedule},
    plan::Plan,
    timing::Timing,
    token::Token,
};
use crate::{
    device::{Backend, CapturedGraph, EventId, GraphId, Identity, Op, SparseWeight, StreamId, WeightId},
    error::{Error, Result},
    seed::Seed,
};

/// How a virtual GPU is set up.
#[derive(Debug, Clone, Default)]
pub struct Config {
    /// Decides jitter and order, launch by launch.
    pub seed: Seed,
    /// Order of execution.
    pub schedule: Schedule,
    /// Number of the first launch; the draw of a launch depends on its number alone.
    pub first_launch: u64,
    /// What blocks, launches and edges cost.
    pub cost: CostModel,
    /// Executes every op block by block, every read in slices, whether anything overlaps or not. Slow; the same bytes.
    pub full: bool,
}

/// The virtual GPU.
pub struct Sim {
    config: Config,
    kernels: Box<dyn Kernels>,
    memory: Memory,
    weights: Vec<SparseWeight>,
    graphs: BTreeMap<GraphId, Captured>,
    capturing: bool,
    queue: Queue,
    order: Box<dyn Order>,
    seed: Seed,
    timing: Timing,
    data: Data,
    launches: u64,
    stats: Stats,
    hits: Vec<RaceHit>,
    token: Option<Token>,
}

struct Captured {
    trace: CapturedGraph,
    plan: Rc<Plan>,
}

/// Work that the host enqueued and that has not run yet.
#[derive(Default)]
struct Queue {
    ops: Vec<(Op, StreamId)>,
    edges: Vec<(u32, u32)>,
    launched_at: Vec<u64>,
    host_ns: u64,
    /// For each stream, the ops that its next op depends on.
    frontiers: BTreeMap<StreamId, Vec<u32>>,
    events: BTreeMap<EventId, Vec<u32>>,
    /// The graph that was launched, as long as nothing else was enqueued.
    sole: Option<(GraphId, StreamId)>,
}

impl Queue {
    fn is_empty(&self) -> bool {
        self.ops.is_empty() && self.sole.is_none()
    }

    fn enqueue(&mut self, stream: StreamId, op: Op, cost: &CostModel) {
        let position = self.ops.len() as u32;
        let frontier = self.frontiers.entry(stream).or_default();
        self.edges.extend(frontier.drain(..).map(|earlier| (earlier, position)));
        frontier.push(position);
        self.ops.push((op, stream));
        self.launched_at.push(self.host_ns);
        self.host_ns += cost.eager_launch_ns;
    }

    /// Appends a graph's ops: its first ones follow what `stream` held, and what comes next on `stream` follows all.
    fn append(&mut self, graph: &CapturedGraph, stream: StreamId, cost: &CostModel) {
        let base = self.ops.len() as u32;
        let before = self.frontiers.remove(&stream).unwrap_or_default();
        let mut has = vec![(false, false); graph.ops.len()];
        for &(earlier, later) in &graph.edges {
            self.edges.push((base + earlier, base + later));
            has[earlier as usize].1 = true;
            has[later as usize].0 = true;
        }
        let mut last = Vec::new();
        for (op, (has_earlier, has_later)) in has.into_iter().enumerate() {
            let position = base + op as u32;
            if !has_earlier {
                self.edges.extend(before.iter().map(|&earlier| (earlier, position)));
            }
            if !has_later {
                last.push(position);
            }
        }
        self.frontiers.insert(stream, if last.is_empty() { before } else { last });
        self.ops.extend(graph.ops.iter().cloned());
        self.launched_at.resize(self.ops.len(), self.host_ns);
        self.host_ns += cost.graph_launch_ns;
    }
}

impl Sim {
    /// A virtual GPU that computes with `kernels`.
    pub fn new(config: Config, kernels: Box<dyn Kernels>) -> Self {
        let (order, seed) = (config.schedule.order(), config.seed);
        let seed = if let Schedule::Replay(token) = config.schedule.split().0 { token.seed() } else { seed };
        let data = Data::new(config.full);
        Self {
            launches: config.first_launch,
            kernels,
            memory: Memory::new(0),
            weights: Vec::new(),
            graphs: BTreeMap::new(),
            capturing: false,
            queue: Queue::default(),
            order,
            seed,
            timing: Timing::new(config.cost.clone()),
            data,
            stats: Stats::default(),
            hits: Vec::new(),
            token: None,
            config,
        }
    }

    /// Puts a lone launched graph into the queue as ops, before something else joins it.
    fn flatten(&mut self) {
        if let Some((graph, stream)) = self.queue.sole.take() {
            self.queue.append(&self.graphs[&graph].trace, stream, &self.config.cost);
        }
    }

    fn run(&mut self, plan: &Plan) -> Result<()> {
        let seed = self.seed.fork("launch").index(self.launches);
        self.timing.clear();
        for op in &plan.ops {
            self.kernels.blocks(op, &self.memory, &mut self.timing.blocks);
            self.timing.end_grid();
        }
        self.order.begin(seed.fork("order"), &plan.streams);
        self.timing.run(plan, &mut *self.order, &mut seed.rng());
        self.timing.count(plan, &mut self.stats);
        let mut machine = Machine {
            kernels: &*self.kernels,
            memory: &mut self.memory,
            weights: &self.weights,
            plan,
            timing: &self.timing,
        };
        let (launch, logged) = (self.launches, self.hits.len());
        self.stats.sliced_ops += self.data.run(&mut machine, launch, &mut self.hits);
        self.stats.race_hits += (self.hits.len() - logged) as u64;
        let fingerprint = self.timing.fingerprint();
        self.launches += 1;
        self.token = Some(Token::new(&self.config.schedule, self.seed, launch, fingerprint));
        match self.config.schedule.split().0 {
            Schedule::Replay(token) if token.launch() == launch && token.fingerprint() != fingerprint => {
                Err(Error::usage(format!("launch {launch} took another interleaving than its replay token names"))
                    .hint("replay with the same build, configuration and workload"))
            }
            _ => Ok(()),
        }
    }
}

impl Backend for Sim {
    fn identity(&self) -> Identity {
        Identity { backend: "sim", name: "virtual GPU".to_owned() }
    }

    fn reserve(&mut self, bytes: u64) -> Result<()> {
        self.memory.reserve(bytes);
        Ok(())
    }

    fn load_weight(&mut self, id: WeightId, weight: &SparseWeight) -> Result<()> {
        assert_eq!(id.0 as usize, self.weights.len(), "weights are loaded in the order of their ids");
        self.weights.push(weight.clone());
        Ok(())
    }

    fn create_stream(&mut self, _stream: StreamId) -> Result<()> {
        Ok(())
    }

    fn enqueue(&mut self, stream: StreamId, op: &Op) -> Result<()> {
        if !self.capturing {
            self.flatten();
            self.queue.enqueue(stream, op.clone(), &self.config.cost);
        }
        Ok(())
    }

    fn record(&mut self, stream: StreamId, event: EventId) -> Result<()> {
        if !self.capturing {
            self.flatten();
            let frontier = self.queue.frontiers.get(&stream).cloned().unwrap_or_default();
            self.queue.events.insert(event, frontier);
        }
        Ok(())
    }

    fn wait(&mut self, stream: StreamId, event: EventId) -> Result<()> {
        if self.capturing {
            return Ok(());
        }
        self.flatten();
        let Some(recorded) = self.queue.events.get(&event) else {
            return Err(Error::usage(format!("event {} is waited for after a synchronisation", event.0)));
        };
        let frontier = self.queue.frontiers.entry(stream).or_default();
        frontier.extend(recorded);
        frontier.sort_unstable();
        frontier.dedup();
        Ok(())
    }

    fn query(&mut self, event: EventId) -> Result<bool> {
        Ok(self.queue.events.get(&event).is_none_or(Vec::is_empty))
    }

    fn begin_capture(&mut self, _stream: StreamId) -> Result<()> {
        self.capturing = true;
        Ok(())
    }

    fn end_capture(&mut self, id: GraphId, graph: &CapturedGraph) -> Result<()> {
        self.capturing = false;
        let plan = Rc::new(Plan::new(graph.ops.clone(), &graph.edges, vec![0; graph.ops.len()], &self.config.cost));
        self.graphs.insert(id, Captured { trace: graph.clone(), plan });
        Ok(())
    }

    fn launch(&mut self, graph: GraphId, stream: StreamId) -> Result<()> {
        if self.queue.is_empty() {
            self.queue.sole = Some((graph, stream));
        } else {
            self.flatten();
            self.queue.append(&self.graphs[&graph].trace, stream, &self.config.cost);
        }
        Ok(())
    }

    fn synchronize(&mut self) -> Result<()> {
        if self.queue.is_empty() {
            self.queue.events.clear();
            return Ok(());
        }
        let queue = std::mem::take(&mut self.queue);
        let plan = if let Some((graph, _)) = queue.sole {
            Rc::clone(&self.graphs[&graph].plan)
        } else {
            let mut edges = queue.edges;
            edges.sort_unstable();
            edges.dedup();
            Rc::new(Plan::new(queue.ops, &edges, queue.launched_at, &self.config.cost))
        };
        self.run(&plan)
    }

    fn probe(&mut self, _stream: StreamId, op: &Op) -> Result<()> {
        let mut blocks = Vec::new();
        self.kernels.blocks(op, &self.memory, &mut blocks);
        let mut scratch = Scratch::default();
        let view = View::new(op, &self.memory, &self.weights);
        self.kernels.compute(op, &blocks, &view, &mut Writes::new(op, &mut scratch));
        for (range, bytes) in scratch.iter() {
            self.memory.write(range.start, bytes);
        }
        Ok(())
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<()> {
        self.memory.write(address, bytes);
        Ok(())
    }

    fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<()> {
        bytes.copy_from_slice(self.memory.bytes(address..address + bytes.len() as u64));
        Ok(())
    }

    fn stats(&self) -> Stats {
        self.stats
    }

    fn logs_races(&self) -> bool {
        true
    }

    fn drain_race_hits(&mut self) -> Vec<RaceHit> {
        std::mem::take(&mut self.hits)
    }

    fn timeline(&self) -> Vec<(u64, u64)> {
        self.timing.op_start.iter().copied().zip(self.timing.op_end.iter().copied()).collect()
    }

    fn replay_token(&self) -> Option<String> {
        self.token.as_ref().map(Token::to_string)
    }
}
