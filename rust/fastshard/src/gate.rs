//! What a caller makes of findings: warnings that count as errors, and warnings and notes that are put aside.

use serde::Deserialize;

use crate::codes::{self, Code};
use crate::error::{Error, Finding, Result, Severity};

/// The rules by which findings are judged.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Gate {
    /// True if each warning counts as an error.
    pub warnings: bool,
    /// Codes whose warnings and notes count as errors.
    pub error: Vec<Code>,
    /// Codes whose warnings and notes are ignored.
    pub ignore: Vec<Code>,
    /// The caller's own findings that an option has decided, for the manifest.
    pub decided: Vec<Finding>,
}

impl Gate {
    /// Judges findings, and records in each the option that decided it. An accepted finding stays a warning.
    ///
    /// # Errors
    /// `FS515` if an error is to be ignored.
    pub fn judge(&self, findings: &mut [Finding]) -> Result<()> {
        let mut refused = Vec::new();
        for finding in findings {
            if finding.is_accepted() || finding.is_raised() {
                continue;
            }
            let is_error = finding.severity == Severity::Error;
            if self.ignore.contains(&finding.code) {
                match is_error {
                    true => refused.push(not_ignored(finding)),
                    false => finding.decided = Some(format!("ignore {}", finding.code)),
                }
            } else if is_error {
                continue;
            } else if self.error.contains(&finding.code) {
                finding.severity = Severity::Error;
                finding.decided = Some(format!("{RAISED} {}", finding.code));
            } else if self.warnings && finding.severity == Severity::Warning {
                finding.severity = Severity::Error;
                finding.decided = Some(FAIL_ON.into());
            }
        }
        match refused.is_empty() {
            true => Ok(()),
            false => Err(Error::from(refused)),
        }
    }

    /// Judges findings of a run before its result is published.
    ///
    /// # Errors
    /// All of them, if one is an error; `FS515` as for [`Gate::judge`].
    pub fn pass(&self, mut findings: Vec<Finding>) -> Result<Vec<Finding>> {
        self.judge(&mut findings)?;
        match findings.iter().any(|f| f.severity == Severity::Error) {
            true => Err(findings.into()),
            false => Ok(findings),
        }
    }
}

const RAISED: &str = "error";
const FAIL_ON: &str = "fail_on warning";

impl Finding {
    /// True if `accept` took it.
    pub fn is_accepted(&self) -> bool {
        self.decided.as_deref().is_some_and(|by| by.starts_with("accept "))
    }

    /// True for a warning or note that was made an error.
    pub fn is_raised(&self) -> bool {
        self.decided.as_deref().is_some_and(|by| by == FAIL_ON || by.starts_with("error "))
    }
}

fn not_ignored(finding: &Finding) -> Finding {
    let message = format!("ignore {}: an error cannot be ignored: {finding}", finding.code);
    Finding::new(codes::USAGE, message).help(
        "fix it; an error that may be accepted has a name (--accept WHAT), which `fastshard explain` states",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::exit_code;

    fn found() -> Vec<Finding> {
        vec![
            Finding::new(codes::PAD_NOT_ZERO, "warning"),
            Finding::new(codes::IGNORED, "note"),
            Finding {
                decided: Some("accept copies".into()),
                ..Finding::new(codes::DUPLICATED_SHARD, "accepted")
            }
            .severity(Severity::Warning),
        ]
    }

    fn decide(gate: &Gate) -> Vec<(Severity, Option<String>)> {
        let mut findings = found();
        gate.judge(&mut findings).unwrap();
        // Twice is once.
        let once = findings.clone();
        gate.judge(&mut findings).unwrap();
        assert_eq!(once, findings);
        findings.into_iter().map(|f| (f.severity, f.decided)).collect()
    }

    #[test]
    fn without_options_nothing_is_decided() {
        let accepted = Some("accept copies".to_string());
        let expected = [(Severity::Warning, None), (Severity::Note, None), (Severity::Warning, accepted)];
        assert_eq!(decide(&Gate::default()), expected);
    }

    #[test]
    fn warnings_count_as_errors_and_what_was_accepted_does_not() {
        let accepted = (Severity::Warning, Some("accept copies".to_string()));
        let gate = Gate { warnings: true, ..Gate::default() };
        let raised = (Severity::Error, Some("fail_on warning".to_string()));
        assert_eq!(decide(&gate), [raised, (Severity::Note, None), accepted.clone()]);
        let gate = Gate {
            error: vec![codes::PAD_NOT_ZERO, codes::IGNORED, codes::DUPLICATED_SHARD],
            ..Gate::default()
        };
        let raised = |code: &str| (Severity::Error, Some(format!("error {code}")));
        assert_eq!(decide(&gate), [raised("FS307"), raised("FS212"), accepted]);
    }

    #[test]
    fn what_is_ignored_is_no_error_by_fail_on() {
        let gate = Gate { warnings: true, ignore: vec![codes::PAD_NOT_ZERO], ..Gate::default() };
        assert_eq!(decide(&gate)[0], (Severity::Warning, Some("ignore FS307".to_string())));
    }

    #[test]
    fn an_error_is_not_ignored() {
        let gate = Gate { ignore: vec![codes::CRC], ..Gate::default() };
        let error = gate.judge(&mut [Finding::new(codes::CRC, "damaged").file("a.pt")]).unwrap_err();
        assert_eq!(error.findings()[0].code, codes::USAGE);
        assert!(error.findings()[0].message.contains("a.pt: damaged"));
        assert_eq!(exit_code(error.findings()), 2);
    }

    #[test]
    fn what_was_raised_is_a_problem_whatever_its_code() {
        // As errors of their own these are exit codes 2 and 3.
        let gate = Gate { warnings: true, ..Gate::default() };
        for code in [codes::MASTERS_NOT_CHECKABLE, codes::UNCOMMITTED] {
            let error = gate.pass(vec![Finding::new(code, "").severity(Severity::Warning)]).unwrap_err();
            assert_eq!(exit_code(error.findings()), 1);
        }
    }
}
