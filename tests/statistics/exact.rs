use toolstorm::stats::{Counts, exact, interval};

use crate::table::{assert_close, rows};

#[test]
fn exact_tests_agree_with_scipy() {
    for row in rows("exact") {
        let first = Counts::new(row.count("events_1"), row.count("trials_1"));
        let second = Counts::new(row.count("events_2"), row.count("trials_2"));
        let what = format!("{first:?} {second:?}");
        assert_close(exact::fisher(first, second), row.number("fisher"), 1e-6, &what);
        // SciPy samples the nuisance rate and so may miss a little of the maximum.
        assert_close(exact::boschloo(first, second), row.number("boschloo"), 2e-3, &what);
        assert_close(exact::boschloo(second, first), row.number("boschloo"), 2e-3, &what);
    }
}

/// R: `binom.test(1, 10)$p.value` and its like.
#[test]
fn the_sign_test_is_the_binomial_test_at_one_half() {
    for (first, second, wanted) in
        [(0, 6, 0.03125), (9, 1, 0.021_484_375), (5, 5, 1.0), (0, 0, 1.0), (3, 12, 0.035_156_25)]
    {
        assert_close(exact::sign(first, second), wanted, 1e-9, &format!("{first} {second}"));
    }
}

#[test]
fn holm_agrees_with_statsmodels() {
    let numbers = |text: &str| text.split(' ').map(|x| x.parse().unwrap()).collect::<Vec<f64>>();
    for row in rows("holm") {
        let got = exact::holm(&numbers(row.text("p_values")));
        let wanted = numbers(row.text("adjusted"));
        assert_eq!(got.len(), wanted.len());
        assert!(got.iter().zip(&wanted).all(|(a, b)| (a - b).abs() < 1e-12), "{got:?} {wanted:?}");
    }
}

#[test]
fn normal_quantiles_agree_with_scipy() {
    for row in rows("normal") {
        let p = row.number("p");
        assert!((interval::normal_quantile(p) - row.number("quantile")).abs() < 1e-8, "{p}");
    }
}
