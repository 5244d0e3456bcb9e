//! The real oracle: a probe is a stress run in a fresh server.

use std::path::PathBuf;

use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

use super::{Outcome, Probe, Trial, toggle::Configurations};
use crate::{
    clock::Clock,
    error::{Error, Result},
    report::{folder::Folder, measure, summary::ArmSummary, tally::Tally},
    run::{Consumer, Launch, Load, Plan, Runner, Todo, journal::Journal},
    seed::Seed,
    stats::Counts,
};

/// Below this share of judged sessions a probe says nothing: the server fell over under the load.
const JUDGED_SHARE: f64 = 0.5;

/// Runs probes through the harness.
pub struct Oracle<'a> {
    /// What every probe shares; its arms are replaced.
    pub plan: &'a Plan,
    /// The configurations.
    pub configurations: &'a Configurations,
    /// Where each probe gets a folder of its own.
    pub result: PathBuf,
    /// The clock of all times.
    pub clock: Clock,
    /// Ends the search.
    pub stop: CancellationToken,
    /// Where requests run.
    pub runtime: &'a Runtime,
    /// Probes so far.
    pub probes: u64,
}

impl Oracle<'_> {
    /// The plan of a probe: one arm, one launch, sessions and launch of its own.
    fn plan(&self, number: u64, probe: &Probe) -> Plan {
        let mut arm = self.configurations.arm(&probe.bad);
        arm.name = format!("probe-{number}");
        arm.sessions = probe.sessions;
        arm.repetitions = 1;
        arm.hazards = false;
        let seed = Seed(self.plan.seed).fork("probe").index(number).0;
        // A probe's size is the search's choice.
        let load = Load { until: None, ..self.plan.load.clone() };
        Plan { arms: vec![arm], seed, load, partition: None, ..self.plan.clone() }
    }

    fn judge(arm: &ArmSummary, tally: &Tally, wanted: u64) -> Outcome {
        if let Some(reason) = tally.launches.values().find_map(|launch| launch.failure.clone()) {
            return Outcome::Skipped(reason);
        }
        if (arm.sessions_judged as f64) < wanted as f64 * JUDGED_SHARE {
            return Outcome::Skipped(format!("only {} of {wanted} sessions could be judged", arm.sessions_judged));
        }
        Outcome::Judged(Counts::new(arm.sessions_corrupted, arm.sessions_judged))
    }

    async fn probe(&self, number: u64, probe: &Probe) -> Result<Outcome> {
        let plan = self.plan(number, probe);
        let folder = self.result.join(format!("probe-{number:03}"));
        // What an interrupted probe left is of no use: it is run again as a whole.
        let _ = std::fs::remove_dir_all(&folder);
        // The manifest is what the replay lines in a probe's evidence need.
        let folder = Folder::create_at(folder, format!("probe-{number}"), plan.clone(), self.clock)?;
        let mut journal = Journal::create(&folder.journal())?;
        let mut tally = Tally::default();
        let finished = {
            let mut runner = Runner {
                plan: &plan,
                result: folder.path,
                id: folder.manifest.id,
                clock: self.clock,
                selfcheck: None,
                stop: self.stop.clone(),
                jobs: 1,
                consumers: vec![&mut journal as &mut dyn Consumer, &mut tally],
            };
            let launch = Launch { number: 0, arm: 0, repetition: 0 };
            runner.run(&[Todo { launch, sessions: (0..probe.sessions).collect() }]).await?
        };
        if finished.interrupted {
            return Err(
                Error::incomplete("the search was interrupted").hint("go on with --resume and its result folder")
            );
        }
        let summary = measure::summary(&plan, &tally, None);
        Ok(Self::judge(&summary.arms[0], &tally, probe.sessions))
    }
}

impl Trial for Oracle<'_> {
    fn run(&mut self, probe: &Probe) -> Result<Outcome> {
        Ok(self.run_all(std::slice::from_ref(probe))?.remove(0))
    }

    fn run_all(&mut self, probes: &[Probe]) -> Result<Vec<Outcome>> {
        let numbered = (self.probes..).zip(probes).map(|(number, probe)| self.probe(number, probe));
        let outcomes = self.runtime.block_on(futures::future::try_join_all(numbered))?;
        self.probes += probes.len() as u64;
        Ok(outcomes)
    }
}
