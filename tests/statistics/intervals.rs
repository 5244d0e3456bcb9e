use toolstorm::stats::{Counts, interval};

use crate::table::{assert_close, rows};

#[test]
fn one_arm_agrees_with_scipy() {
    for row in rows("one_arm") {
        let counts = Counts::new(row.count("events"), row.count("trials"));
        let confidence = row.number("confidence");
        let what = format!("{counts:?} at {confidence}");
        let exact = interval::clopper_pearson(counts, confidence);
        assert_close(exact.lower, row.number("exact_low"), 1e-6, &what);
        assert_close(exact.upper, row.number("exact_high"), 1e-6, &what);
        assert_close(interval::upper_bound(counts, confidence), row.number("upper"), 1e-6, &what);
        let wilson = interval::wilson(counts, confidence);
        assert_close(wilson.lower, row.number("wilson_low"), 1e-6, &what);
        assert_close(wilson.upper, row.number("wilson_high"), 1e-6, &what);
    }
}

#[test]
fn the_difference_agrees_with_statsmodels() {
    for row in rows("newcombe") {
        let first = Counts::new(row.count("events_1"), row.count("trials_1"));
        let second = Counts::new(row.count("events_2"), row.count("trials_2"));
        let confidence = row.number("confidence");
        let what = format!("{first:?} - {second:?} at {confidence}");
        let newcombe = interval::newcombe(first, second, confidence);
        assert!((newcombe.lower - row.number("low")).abs() < 1e-9, "{what}: {newcombe:?}");
        assert!((newcombe.upper - row.number("high")).abs() < 1e-9, "{what}: {newcombe:?}");
    }
}

#[test]
fn the_bounds_of_the_reports_hold() {
    let upper = |trials| interval::upper_bound(Counts::new(0, trials), 0.95);
    assert_eq!(format!("{:.1} %", upper(80) * 100.0), "3.7 %");
    assert!(upper(299) < 0.01 && upper(298) >= 0.01);
    assert!(upper(2995) < 0.001 && upper(2994) >= 0.001);
}

#[test]
fn nothing_observed_says_nothing() {
    let nothing = Counts::default();
    assert_eq!(interval::clopper_pearson(nothing, 0.95), toolstorm::stats::Interval::UNIT);
    assert_eq!(interval::upper_bound(nothing, 0.95), 1.0);
    assert_eq!(interval::newcombe(nothing, nothing, 0.95).lower, -1.0);
}
