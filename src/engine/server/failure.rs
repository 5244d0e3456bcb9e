//! What the engine could not do, as an answer of the server.

use super::openai::Refusal;
use crate::engine::request::Failure;

/// The answer to a request that failed in the engine.
pub fn refusal(failure: &Failure) -> Refusal {
    let message = failure.to_string();
    match failure {
        Failure::QueueFull(_) => {
            let refusal = Refusal::new(429, "rate_limit_error", "queue_full", message);
            Refusal { retry_after: Some(1), ..refusal }
        }
        Failure::Lockstep(_) | Failure::InFlight(_) => {
            Refusal::field("x-toolstorm-session", message).code("lockstep_refused")
        }
        Failure::SessionEnded(_) => Refusal::field("x-toolstorm-session", message).code("session_ended"),
        Failure::Stalled(_) => Refusal::new(503, "service_unavailable_error", "lockstep_stalled", message),
        Failure::Draining => {
            let refusal = Refusal::new(503, "service_unavailable_error", "shutting_down", message);
            Refusal { retry_after: Some(5), ..refusal }
        }
        Failure::Engine(_) => Refusal::new(500, "server_error", "engine_failed", message),
    }
}
