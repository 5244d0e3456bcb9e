//! `GE_DIFF`: after each step, recompute every layer's logits eagerly from what the step stashed, and compare.

use serde::Serialize;

use super::{batch::Batch, forward::Network};
use crate::error::Result;

/// Where a captured step's logits first differed from an eager computation on the same inputs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Divergence {
    /// Decode step, from 0.
    pub step: u64,
    /// Layer.
    pub layer: u8,
    /// Row of the batch.
    pub row: u32,
    /// Compressed entry.
    pub entry: u32,
    /// What the step left.
    pub captured: f32,
    /// What the eager computation gives.
    pub eager: f32,
    /// What replays the step's launch.
    pub replay: Option<String>,
}

/// What the differential found so far.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Differential {
    /// Rows compared, layer by layer.
    pub samples: u64,
    /// Rows of which some logit differed.
    pub divergences: u64,
    /// The first of them.
    pub first: Option<Divergence>,
}

impl Differential {
    /// Compares the step that just ran.
    pub(super) fn check(&mut self, network: &Network, batch: &Batch, number: u64, replay: Option<&str>) -> Result<()> {
        let step = network.step(batch.bucket, false)?;
        let stride = network.logits_row() as usize;
        let (mut captured, mut eager) = (Vec::new(), Vec::new());
        for (&layer, stash) in &network.persistent(batch.bucket)?.stashes {
            let again = step.recompute(layer, stash)?;
            for (tensor, bytes) in [(&stash.logits, &mut captured), (&again, &mut eager)] {
                bytes.resize(batch.rows * stride, 0);
                network.device.copy_out(tensor.address(), bytes)?;
            }
            for row in 0..batch.rows {
                self.samples += 1;
                let live = row * stride..row * stride + batch.entries(row) as usize * 4;
                let Some(entry) = first_difference(&captured[live.clone()], &eager[live]) else { continue };
                self.divergences += 1;
                let value = |bytes: &[u8]| bytemuck::pod_read_unaligned(&bytes[row * stride + entry * 4..][..4]);
                self.first.get_or_insert_with(|| Divergence {
                    step: number,
                    layer: layer as u8,
                    row: row as u32,
                    entry: entry as u32,
                    captured: value(&captured),
                    eager: value(&eager),
                    replay: replay.map(str::to_owned),
                });
            }
        }
        Ok(())
    }
}

/// The first logit in which two rows differ.
fn first_difference(captured: &[u8], eager: &[u8]) -> Option<usize> {
    // Nearly all rows are the same, and to find that out takes no look at single logits.
    if captured == eager {
        return None;
    }
    captured.chunks(4).zip(eager.chunks(4)).position(|(captured, eager)| captured != eager)
}

#[cfg(test)]
mod tests {
    use crate::{
        engine::{
            model::Model,
            selftest::{Load, dictate},
            toggles::Toggles,
        },
        seed::Seed,
    };

    #[test]
    fn logits_of_fp8_keys_agree_and_are_compared() {
        // Each reader writes its logits by a path of its own.
        for reader in ["0", "1"] {
            let toggles = Toggles::resolve([
                ("TOOLSTORM_DEVICE", "sim"),
                ("TOOLSTORM_MAX_BATCH", "3"),
                ("TOOLSTORM_MAX_CONTEXT", "2048"),
                ("SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", "0"),
                ("SGLANG_SM120_TRITON_INDEXER", reader),
                ("TOOLSTORM_GE_DIFF", "1"),
            ])
            .unwrap();
            assert!(!toggles.bf16_index_keys);
            let mut model = Model::new(&toggles, 24).unwrap();
            let outcome = dictate(&mut model, Load { rows: 3, context: 2048, turns: 3 }, Seed(8)).unwrap();
            let differential = model.differential().unwrap();
            assert_eq!((outcome.wrong, differential.divergences), (0, 0), "{:?}", differential.first);
            assert!(differential.samples > 300, "{differential:?}");
        }
    }
}
