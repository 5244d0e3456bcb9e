//! `junit.xml`: one test case an arm.

use std::time::Duration;

use quick_junit::{NonSuccessKind, Report, TestCase, TestCaseStatus, TestSuite};

use super::{
    summary::{ArmSummary, Outcome, Summary},
    table::details,
};
use crate::error::{Error, Result};

/// The whole document.
pub fn render(summary: &Summary) -> Result<String> {
    let mut suite = TestSuite::new(&summary.name);
    suite.add_test_cases(summary.arms.iter().map(|arm| case(summary, arm)));
    suite.set_time(Duration::try_from_secs_f64(summary.wall_s).unwrap_or_default());
    let mut report = Report::new("toolstorm");
    report.add_test_suite(suite);
    report.to_string().map_err(|error| Error::usage(format!("junit.xml: {error}")))
}

fn case(summary: &Summary, arm: &ArmSummary) -> TestCase {
    let mut status = match arm.verdict {
        Outcome::Pass => TestCaseStatus::success(),
        Outcome::Fail => TestCaseStatus::non_success(NonSuccessKind::Failure),
        Outcome::Inconclusive => TestCaseStatus::non_success(NonSuccessKind::Error),
    };
    let description = details(arm).join("\n");
    match arm.verdict {
        Outcome::Pass => {}
        Outcome::Fail => {
            status.set_type("corruption").set_message(&arm.reason).set_description(description);
        }
        Outcome::Inconclusive => {
            status.set_type("inconclusive").set_message(&arm.reason).set_description(description);
        }
    }
    let mut case = TestCase::new(&arm.name, status);
    case.set_classname(&summary.name).set_system_out(&arm.reason);
    case
}
