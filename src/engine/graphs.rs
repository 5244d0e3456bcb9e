//! One captured step per bucket, largest first, from one shared pool; or pieces with the indexer between; or none.

use std::{collections::BTreeMap, rc::Rc};

use super::{
    forward::{IndexerOperands, Network},
    geometry::COMPRESSED,
    toggles::Toggles,
};
use crate::{
    device::{CapturedGraph, Graph, PoolId},
    error::Result,
};

/// How a bucket's step runs.
enum Plan {
    /// Op by op.
    Eager,
    /// One graph.
    Whole(Graph),
    /// The first piece, then an eager indexer before each other one.
    Pieces(Graph, Vec<(IndexerOperands, Graph)>),
}

/// The steps of all buckets.
pub(super) struct Graphs {
    plans: BTreeMap<u32, Plan>,
}

impl Graphs {
    /// Warms every bucket up, which makes its persistent buffers, and captures it as the toggles say.
    pub(super) fn capture(network: &Network, toggles: &Toggles) -> Result<Self> {
        let pool = network.device.graph_pool();
        let mut plans = BTreeMap::new();
        for &bucket in network.geometry.buckets.iter().rev() {
            network.step(bucket, false)?.run()?;
            network.device.synchronize()?;
            let plan = match (toggles.graph, toggles.indexer_eager) {
                (false, _) => Plan::Eager,
                (true, false) => Plan::Whole(whole(network, bucket, pool)?),
                (true, true) => pieces(network, bucket, pool)?,
            };
            plans.insert(bucket, plan);
        }
        Ok(Self { plans })
    }

    /// Runs the step of `bucket` to its end.
    pub(super) fn run(&self, network: &Network, bucket: u32) -> Result<()> {
        self.enqueue(network, bucket)?;
        network.device.synchronize()
    }

    /// Enqueues the step of `bucket`.
    pub(super) fn enqueue(&self, network: &Network, bucket: u32) -> Result<()> {
        let device = &network.device;
        match self.plans.get(&bucket) {
            Some(Plan::Whole(graph)) => device.launch(graph)?,
            Some(Plan::Pieces(first, rest)) => {
                let step = network.serial_step(bucket)?;
                device.launch(first)?;
                for (operands, piece) in rest {
                    let scratch = step.scratch(operands.layer())?;
                    step.index(operands, &scratch, None)?;
                    step.release(scratch);
                    device.launch(piece)?;
                }
            }
            Some(Plan::Eager) | None => network.step(bucket, false)?.run()?,
        }
        Ok(())
    }

    /// What was captured, by bucket and piece.
    pub(super) fn traces(&self) -> Vec<(u32, Rc<CapturedGraph>)> {
        let trace = |bucket: &u32, graph: &Graph| (*bucket, Rc::clone(graph.trace()));
        self.plans.iter().flat_map(|(bucket, plan)| plan.graphs().map(|graph| trace(bucket, graph))).collect()
    }
}

impl Plan {
    fn graphs(&self) -> impl Iterator<Item = &Graph> {
        let (first, rest) = match self {
            Self::Eager => (None, [].as_slice()),
            Self::Whole(graph) => (Some(graph), [].as_slice()),
            Self::Pieces(first, rest) => (Some(first), rest.as_slice()),
        };
        first.into_iter().chain(rest.iter().map(|(_, piece)| piece))
    }
}

fn whole(network: &Network, bucket: u32, pool: PoolId) -> Result<Graph> {
    let step = network.step(bucket, true)?;
    network.device.begin_capture(format!("decode_{bucket}"), network.streams.main, pool)?;
    step.run()?;
    network.device.end_capture()
}

fn pieces(network: &Network, bucket: u32, pool: PoolId) -> Result<Plan> {
    let (device, main) = (&network.device, network.streams.main);
    let step = network.step(bucket, true)?;
    device.begin_capture(format!("decode_{bucket}_piece_0"), main, pool)?;
    step.embed()?;
    let mut first = None;
    let mut rest = Vec::new();
    let mut pending = None;
    for (layer, compressed) in COMPRESSED.into_iter().enumerate() {
        let opened = step.open(layer, !compressed)?;
        if let Some(operands) = step.indexer(&opened) {
            finish_piece(device.end_capture()?, &mut first, &mut pending, &mut rest);
            pending = Some(operands);
            device.begin_capture(format!("decode_{bucket}_piece_{layer}"), main, pool)?;
        }
        step.close(opened)?;
    }
    step.finish()?;
    let last = device.end_capture()?;
    match first {
        None => Ok(Plan::Whole(last)),
        Some(graph) => {
            rest.extend(pending.map(|operands| (operands, last)));
            Ok(Plan::Pieces(graph, rest))
        }
    }
}

/// Files a finished piece under the indexer that runs before it.
fn finish_piece(
    piece: Graph,
    first: &mut Option<Graph>,
    pending: &mut Option<IndexerOperands>,
    rest: &mut Vec<(IndexerOperands, Graph)>,
) {
    match pending.take() {
        Some(operands) => rest.push((operands, piece)),
        None => *first = Some(piece),
    }
}
