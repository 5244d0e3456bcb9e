//! What the server tells Prometheus.

use std::sync::atomic::AtomicU64;

use prometheus_client::{
    encoding::text::encode,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};

use super::Activity;

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The model ended the answer.
    Stop,
    /// The answer reached its token limit.
    Length,
    /// The answer was cancelled after the number of tokens that the request asked for.
    Cancelled,
    /// The client went away.
    Aborted,
    /// The engine failed the request.
    Failed,
}

impl Ending {
    fn label(self) -> Label {
        let reason = match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
            Self::Aborted => "aborted",
            Self::Failed => "failed",
        };
        [("finished_reason", reason)]
    }
}

type Label = [(&'static str, &'static str); 1];
type Real = Gauge<f64, AtomicU64>;
type Seconds = Counter<f64, AtomicU64>;

/// Every metric, registered.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    requests: Family<Label, Counter>,
    /// Requests that wait for a place in the batch.
    pub waiting: Gauge,
    /// Sequences that run.
    pub running: Gauge,
    /// Pages that running sequences hold.
    pub pages_held: Gauge,
    /// Pages that only the prefix cache holds.
    pub pages_cached: Gauge,
    /// Prompt tokens that were prefilled.
    pub prompt_tokens: Counter,
    /// Prompt tokens that the prefix cache served.
    pub cached_tokens: Counter,
    /// Tokens that were decoded.
    pub generation_tokens: Counter,
    /// Steps.
    pub steps: Counter,
    /// From a request's arrival to its first token.
    pub first_token_seconds: Histogram,
    /// From a request's arrival to its last token.
    pub request_seconds: Histogram,
    /// Time in which the engine's thread worked, waits for the device included.
    pub worker_busy_seconds: Seconds,
    device_busy_seconds: Seconds,
    overlap_share: Real,
    virtual_step_us: Real,
    race_hits: Counter,
    canary_checks: Counter,
    canary_hits: Counter,
    ge_diff_samples: Counter,
    ge_diff_divergences: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All metrics at zero.
    pub fn new() -> Self {
        let seconds = || Histogram::new(exponential_buckets(0.001, 2.0, 18));
        let mut metrics = Self {
            registry: Registry::with_prefix("toolstorm"),
            requests: Family::default(),
            waiting: Gauge::default(),
            running: Gauge::default(),
            pages_held: Gauge::default(),
            pages_cached: Gauge::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            generation_tokens: Counter::default(),
            steps: Counter::default(),
            first_token_seconds: seconds(),
            request_seconds: seconds(),
            worker_busy_seconds: Seconds::default(),
            device_busy_seconds: Seconds::default(),
            overlap_share: Real::default(),
            virtual_step_us: Real::default(),
            race_hits: Counter::default(),
            canary_checks: Counter::default(),
            canary_hits: Counter::default(),
            ge_diff_samples: Counter::default(),
            ge_diff_divergences: Counter::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let registry = &mut self.registry;
        registry.register("requests", "Requests by how they ended", self.requests.clone());
        registry.register("requests_waiting", "Requests waiting for a place in the batch", self.waiting.clone());
        registry.register("requests_running", "Sequences running", self.running.clone());
        registry.register("pages_held", "Cache pages held by running sequences", self.pages_held.clone());
        registry.register("pages_cached", "Cache pages held by the prefix cache alone", self.pages_cached.clone());
        registry.register("prompt_tokens", "Prompt tokens prefilled", self.prompt_tokens.clone());
        registry.register("cached_tokens", "Prompt tokens served by the prefix cache", self.cached_tokens.clone());
        registry.register("generation_tokens", "Tokens decoded", self.generation_tokens.clone());
        registry.register("steps", "Steps taken", self.steps.clone());
        registry.register("time_to_first_token_seconds", "Arrival to first token", self.first_token_seconds.clone());
        registry.register("request_duration_seconds", "Arrival to last token", self.request_seconds.clone());
        registry.register(
            "worker_busy_seconds",
            "Time in which the engine's thread worked, waits for the device included",
            self.worker_busy_seconds.clone(),
        );
        registry.register(
            "device_busy_seconds",
            "Time in which a real device was at work, without copies; 0 where the clock is virtual",
            self.device_busy_seconds.clone(),
        );
        registry.register(
            "overlap_share",
            "Share of busy device time with two or more streams active",
            self.overlap_share.clone(),
        );
        registry.register(
            "virtual_step_us",
            "Mean decode step on the device's clock, microseconds",
            self.virtual_step_us.clone(),
        );
        registry.register("race_hits", "Accesses in the race log", self.race_hits.clone());
        registry.register("canary_checks", "Index-K pages checked", self.canary_checks.clone());
        registry.register("canary_hits", "Index-K changes that no store explains", self.canary_hits.clone());
        registry.register("ge_diff_samples", "Graph-against-eager comparisons", self.ge_diff_samples.clone());
        registry.register("ge_diff_divergences", "Comparisons that differed", self.ge_diff_divergences.clone());
    }

    /// Counts a request that ended.
    pub fn ended(&self, ending: Ending) {
        self.requests.get_or_create(&ending.label()).inc();
    }

    /// Takes over what the model tells.
    pub fn observe(&self, activity: &Activity) {
        self.overlap_share.set(activity.overlap_share.unwrap_or(0.0));
        self.virtual_step_us.set(activity.virtual_step_us.unwrap_or(0.0));
        let busy = activity.device_busy_seconds.unwrap_or(0.0);
        self.device_busy_seconds.inner().store(busy.to_bits(), std::sync::atomic::Ordering::Relaxed);
        for (counter, value) in [
            (&self.race_hits, activity.race_hits),
            (&self.canary_checks, activity.canary_checks),
            (&self.canary_hits, activity.canary_hits),
            (&self.ge_diff_samples, activity.ge_diff_samples),
            (&self.ge_diff_divergences, activity.ge_diff_divergences),
        ] {
            counter.inner().store(value.unwrap_or(0), std::sync::atomic::Ordering::Relaxed);
        }
    }

    /// The exposition in the `OpenMetrics` text format.
    pub fn render(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("writing to a string succeeds");
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exposition_holds_what_was_counted() {
        let metrics = Metrics::new();
        metrics.ended(Ending::Stop);
        metrics.generation_tokens.inc_by(7);
        metrics.observe(&Activity {
            overlap_share: Some(0.5),
            device_busy_seconds: Some(1.25),
            race_hits: Some(3),
            canary_checks: Some(900),
            canary_hits: Some(4),
            ge_diff_samples: Some(400),
            ge_diff_divergences: Some(2),
            ..Activity::default()
        });
        let text = metrics.render();
        for line in [
            "toolstorm_requests_total{finished_reason=\"stop\"} 1",
            "toolstorm_generation_tokens_total 7",
            "toolstorm_overlap_share 0.5",
            "toolstorm_device_busy_seconds_total 1.25",
            "toolstorm_race_hits_total 3",
            "toolstorm_canary_checks_total 900",
            "toolstorm_canary_hits_total 4",
            "toolstorm_ge_diff_samples_total 400",
            "toolstorm_ge_diff_divergences_total 2",
        ] {
            assert!(text.lines().any(|l| l == line), "no `{line}` in\n{text}");
        }
    }
}
