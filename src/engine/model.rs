//! The model on a device: prefill, decode, and what happened meanwhile.

use std::{rc::Rc, time::Duration};

use super::{
    Activity, DecodeRow, Prefill, TokenModel,
    batch::{Batch, check_prefill},
    canary::Canary,
    differential::Differential,
    forward::Network,
    graphs::Graphs,
    races::StepRaces,
    toggles::{DeviceChoice, Toggles},
    tokenizer::Token,
    weights::Weights,
};
use crate::{
    device::{
        Backend, CapturedGraph, Device, Identity,
        cuda::{self, Cuda},
        kernel::{Kernel, PAGE_TOKENS, SPAN},
        sim::{self, Schedule, Stats, reference::Reference},
    },
    error::Result,
};

/// Tokens that a resumed sequence replays into its window and rings.
const REPLAYED: u32 = PAGE_TOKENS as u32;

/// The model: weights and caches on a device, one captured step per bucket.
pub struct Model {
    pub(super) network: Network,
    graphs: Graphs,
    pub(super) batch: Batch,
    steps: u64,
    /// What the device had worked before the first step.
    set_up: Duration,
    decode_stats: Stats,
    races: Option<StepRaces>,
    /// The token of the launch to replay, where the order is a replay.
    replay: Option<String>,
    differential: Option<Differential>,
    canary: Option<Canary>,
}

impl Model {
    /// The model as the toggles say, with `pages` leasable pages, on the device that they choose.
    pub fn new(toggles: &Toggles, pages: u32) -> Result<Self> {
        Self::on(open_device(toggles)?, toggles, pages, &Weights::new(toggles.max_context))
    }

    /// The model with given weights on a given device.
    pub fn on(device: Device, toggles: &Toggles, pages: u32, weights: &Weights) -> Result<Self> {
        let network = Network::new(device, toggles, toggles.geometry(pages), weights)?;
        let graphs = Graphs::capture(&network, toggles)?;
        let canary = toggles.index_k_canary.then(|| Canary::new(&network)).transpose()?;
        // Set-up runs steps of padded rows only; what they did is no part of the run.
        network.device.drain_race_hits();
        Ok(Self {
            set_up: network.device.busy().unwrap_or_default(),
            network,
            graphs,
            batch: Batch::default(),
            steps: 0,
            decode_stats: Stats::default(),
            races: None,
            replay: match toggles.order.split().0 {
                Schedule::Replay(token) => Some(token.to_string()),
                _ => None,
            },
            differential: toggles.ge_diff.then(Differential::default),
            canary,
        })
    }

    /// Fills a sequence's caches with a part of its prompt: one fused kernel a layer, eagerly, on the main stream.
    pub fn prefill(&mut self, chunk: &Prefill<'_>) -> Result<()> {
        check_prefill(chunk, &self.network.geometry)?;
        if let Some(canary) = &mut self.canary {
            let first = (u64::from(chunk.range.start) / PAGE_TOKENS) as usize;
            canary.forget(&chunk.page_table[first..]);
        }
        let entries_from = chunk.range.start;
        let window_from = if chunk.resumed { entries_from.saturating_sub(REPLAYED) } else { entries_from };
        let start = window_from.saturating_sub(SPAN as u32);
        let words: Vec<i32> =
            chunk.tokens[start as usize..chunk.range.end as usize].iter().map(|token| i32::from(*token)).collect();
        let table: Vec<i32> = chunk.page_table.iter().map(|page| *page as i32).collect();
        let network = &self.network;
        let (device, inputs) = (&network.device, &network.inputs);
        device.copy_in(inputs.chunk.address(), bytemuck::cast_slice(&words))?;
        device.copy_in(inputs.chunk_table.address(), bytemuck::cast_slice(&table))?;
        let ring_page = chunk.window_page;
        network.prefill(words.len() as u64, |table, format| Kernel::Prefill {
            table,
            start,
            window_from,
            entries_from,
            ring_page,
            format,
        })?;
        device.synchronize()
    }

    /// Decodes one token a row and returns the next ones.
    pub fn decode(&mut self, rows: &[DecodeRow<'_>]) -> Result<Vec<Token>> {
        let Self { network, batch, .. } = self;
        batch.fill(rows, &network.geometry)?;
        let (device, inputs) = (&network.device, &network.inputs);
        for (tensor, words) in [
            (&inputs.tokens, &batch.tokens),
            (&inputs.positions, &batch.positions),
            (&inputs.ring_pages, &batch.ring_pages),
            (&inputs.page_table, &batch.page_table),
        ] {
            device.copy_in(tensor.address(), bytemuck::cast_slice(words))?;
        }
        if let Some(canary) = &mut self.canary {
            canary.check(network, batch, false, self.steps)?;
        }
        let before = device.stats();
        self.graphs.run(network, batch.bucket)?;
        let ran = device.stats().since(&before);
        self.decode_stats.add(&ran);
        let traceable = ran.race_hits > 0 || self.replay.is_some() || self.differential.is_some();
        let token = if traceable { device.replay_token() } else { None };
        let mut next = vec![0i32; batch.rows];
        device.copy_out(inputs.next_tokens.address(), bytemuck::cast_slice_mut(&mut next))?;
        if let Some(canary) = &mut self.canary {
            canary.check(network, batch, true, self.steps)?;
        }
        if let Some(differential) = &mut self.differential {
            differential.check(network, batch, self.steps, token.as_deref())?;
        }
        let replayed = self.replay.is_some() && self.replay == token;
        let hits = device.drain_race_hits();
        let step = self.steps;
        self.races = (replayed || !hits.is_empty()).then_some(StepRaces { step, replay: token, replayed, hits });
        self.steps += 1;
        Ok(next.into_iter().map(|token| token as Token).collect())
    }

    /// Enqueues the last decoded step `times` times more and waits for the last of them. The host's copies stay out, so
    /// that the time is the device's; the caches afterwards are those of as many equal steps.
    pub fn repeat(&mut self, times: u32) -> Result<()> {
        (0..times).try_for_each(|_| self.graphs.enqueue(&self.network, self.batch.bucket))?;
        self.network.device.synchronize()
    }

    /// Decode steps so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Time and overlap of the decode steps so far, on the device's clock.
    pub fn decode_stats(&self) -> &Stats {
        &self.decode_stats
    }

    /// What the graph-against-eager probe found, if it runs.
    pub fn differential(&self) -> Option<&Differential> {
        self.differential.as_ref()
    }

    /// What the index-key canary found, if it runs.
    pub fn canary(&self) -> Option<&Canary> {
        self.canary.as_ref()
    }

    /// The captured graphs with their buckets.
    pub fn graphs(&self) -> Vec<(u32, Rc<CapturedGraph>)> {
        self.graphs.traces()
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.network.device
    }

    /// Arena offset of the index keys of `page` in `layer`, for tests that write where nothing should.
    pub fn index_key_page(&self, layer: usize, page: u32) -> Option<u64> {
        let keys = &self.network.caches.get(layer)?.compressed.as_ref()?.index_keys;
        Some(keys.address() + u64::from(page) * self.network.geometry.keys.page_bytes())
    }
}

impl TokenModel for Model {
    fn prefill(&mut self, chunk: &Prefill<'_>) -> Result<()> {
        Self::prefill(self, chunk)
    }

    fn decode(&mut self, rows: &[DecodeRow<'_>]) -> Result<Vec<Token>> {
        Self::decode(self, rows)
    }

    fn take_races(&mut self) -> Option<StepRaces> {
        self.races.take()
    }

    fn device(&self) -> Identity {
        self.network.device.identity()
    }

    fn activity(&self) -> Activity {
        let (stats, busy) = (&self.decode_stats, self.network.device.busy());
        Activity {
            steps: self.steps,
            overlap_share: busy.is_none().then(|| stats.overlap_share()),
            virtual_step_us: (self.steps > 0).then(|| stats.total_ns as f64 / 1000.0 / self.steps as f64),
            device_busy_seconds: busy.map(|busy| busy.saturating_sub(self.set_up).as_secs_f64()),
            race_hits: self.network.device.logs_races().then_some(stats.race_hits),
            canary_checks: self.canary.as_ref().map(|canary| canary.checks),
            canary_hits: self.canary.as_ref().map(|canary| canary.hits),
            canary_first: self.canary.as_ref().and_then(|canary| canary.first),
            ge_diff_samples: self.differential.as_ref().map(|differential| differential.samples),
            ge_diff_divergences: self.differential.as_ref().map(|differential| differential.divergences),
            ge_diff_first: self.differential.as_ref().and_then(|differential| differential.first.clone()),
        }
    }
}

/// The backend that a choice comes to on this machine, never `Auto`.
pub fn backend(choice: DeviceChoice) -> DeviceChoice {
    match choice {
        DeviceChoice::Auto if cuda::device_count() > 0 => DeviceChoice::Cuda,
        DeviceChoice::Auto => DeviceChoice::Sim,
        chosen => chosen,
    }
}

/// The device that the toggles choose.
fn open_device(toggles: &Toggles) -> Result<Device> {
    match backend(toggles.device) {
        DeviceChoice::Cuda => Ok(Device::new(Box::new(Cuda::open(0)?))),
        DeviceChoice::Auto | DeviceChoice::Sim => Ok(virtual_gpu(toggles)),
    }
}

/// A virtual GPU with the toggles' seed and order; two that check each other, where the order asks for them.
pub fn virtual_gpu(toggles: &Toggles) -> Device {
    let (order, twice) = toggles.order.split();
    let config = sim::Config {
        seed: toggles.seed,
        schedule: order.clone(),
        cost: toggles.cost.clone(),
        ..sim::Config::default()
    };
    let gpu = || sim::Sim::new(config.clone(), Box::new(Reference::new()));
    let backend: Box<dyn Backend> = if twice { Box::new(sim::Rerun::new(gpu(), gpu())) } else { Box::new(gpu()) };
    Device::new(backend)
}
