//! What the probes found, in words: the log and `/stats` say the same.

use super::{Activity, canary::CanaryHit, differential::Divergence};

/// What each probe found first, in a line.
pub fn first(activity: &Activity) -> Vec<String> {
    let differential = activity.ge_diff_first.as_ref().map(|first| {
        let Divergence { step, layer, row, entry, captured, eager, replay } = first;
        let replay = replay.as_ref().map_or_else(String::new, |token| format!("; toolstorm replay {token}"));
        format!(
            "GE_DIFF: step {step}, layer {layer}, row {row}, entry {entry}: {captured} captured, {eager} eager{replay}"
        )
    });
    let canary = activity.canary_first.map(|CanaryHit { step, layer, page, slot }| {
        format!("canary: step {step}, layer {layer}, page {page}, slot {slot} changed and nothing stored it")
    });
    differential.into_iter().chain(canary).collect()
}

/// How much each probe looked at and found, in a line; nothing of a probe that is off.
pub fn tallies(activity: &Activity) -> Vec<String> {
    let part = |found: Option<u64>, of: Option<u64>| Some((found?, of?));
    let differential = part(activity.ge_diff_divergences, activity.ge_diff_samples)
        .map(|(found, of)| format!("GE_DIFF: {found} of {of} rows differed"));
    let canary = part(activity.canary_hits, activity.canary_checks)
        .map(|(found, of)| format!("canary: {found} keys changed unexplained, in {of} pages checked"));
    differential.into_iter().chain(canary).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn divergence(replay: Option<&str>) -> Divergence {
        let replay = replay.map(str::to_owned);
        Divergence { step: 7, layer: 3, row: 2, entry: 5, captured: 1.5, eager: -0.25, replay }
    }

    #[test]
    fn each_probe_tells_what_it_found_first_and_how_much() {
        let found = Activity {
            canary_checks: Some(900),
            canary_hits: Some(4),
            canary_first: Some(CanaryHit { step: 9, layer: 1, page: 17, slot: 63 }),
            ge_diff_samples: Some(400),
            ge_diff_divergences: Some(2),
            ge_diff_first: Some(divergence(Some("ts1-00"))),
            ..Activity::default()
        };
        assert_eq!(
            first(&found),
            [
                "GE_DIFF: step 7, layer 3, row 2, entry 5: 1.5 captured, -0.25 eager; toolstorm replay ts1-00",
                "canary: step 9, layer 1, page 17, slot 63 changed and nothing stored it",
            ]
        );
        assert_eq!(
            tallies(&found),
            ["GE_DIFF: 2 of 400 rows differed", "canary: 4 keys changed unexplained, in 900 pages checked"]
        );
        // On a device without tokens there is nothing to replay.
        let found = Activity { ge_diff_first: Some(divergence(None)), ..Activity::default() };
        assert!(first(&found)[0].ends_with("-0.25 eager"), "{:?}", first(&found));
    }

    #[test]
    fn a_probe_that_found_nothing_has_a_tally_and_one_that_is_off_has_none() {
        let clean = Activity { ge_diff_samples: Some(400), ge_diff_divergences: Some(0), ..Activity::default() };
        assert_eq!((first(&clean), tallies(&clean)), (vec![], vec!["GE_DIFF: 0 of 400 rows differed".to_owned()]));
        assert_eq!((first(&Activity::default()), tallies(&Activity::default())), (vec![], vec![]));
    }
}
