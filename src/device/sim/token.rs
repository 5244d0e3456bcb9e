//! One launch's interleaving as one line of text that can be pasted.

use std::{fmt, str::FromStr};

use sha2::{Digest, Sha256};

use super::order::Schedule;
use crate::{error::Error, seed::Seed};

/// What decides the interleaving of one launch, and a fingerprint of the interleaving that it took.
///
/// Written `ts1-` and hexadecimal digits: order, depth, seed, launch, fingerprint, and four bytes of checksum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    order: Box<Schedule>,
    seed: Seed,
    launch: u64,
    fingerprint: u64,
}

const PREFIX: &str = "ts1-";
const PAYLOAD: usize = 1 + 4 + 8 + 8 + 8;
const CHECKSUM: usize = 4;

impl Token {
    /// A token for a launch that took the interleaving with this fingerprint.
    pub(super) fn new(order: &Schedule, seed: Seed, launch: u64, fingerprint: u64) -> Self {
        match order.split().0 {
            Schedule::Replay(token) => Self { launch, fingerprint, ..token.clone() },
            order => Self { order: Box::new(order.clone()), seed, launch, fingerprint },
        }
    }

    /// The order that was used.
    pub fn schedule(&self) -> &Schedule {
        &self.order
    }

    /// The seed that was used.
    pub fn seed(&self) -> Seed {
        self.seed
    }

    /// The launch that it names.
    pub fn launch(&self) -> u64 {
        self.launch
    }

    /// The fingerprint of that launch's interleaving.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn payload(&self) -> [u8; PAYLOAD] {
        let (kind, depth) = match *self.order {
            Schedule::Random | Schedule::Replay(_) | Schedule::Twice(_) => (0, 0),
            Schedule::Pct { depth } => (1, depth),
            Schedule::Host => (2, 0),
            Schedule::Adversarial => (3, 0),
        };
        let mut bytes = [kind; PAYLOAD];
        bytes[1..5].copy_from_slice(&depth.to_be_bytes());
        bytes[5..13].copy_from_slice(&self.seed.0.to_be_bytes());
        bytes[13..21].copy_from_slice(&self.launch.to_be_bytes());
        bytes[21..29].copy_from_slice(&self.fingerprint.to_be_bytes());
        bytes
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let payload = self.payload();
        f.write_str(PREFIX)?;
        payload.iter().chain(&checksum(&payload)).try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Token {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let refuse = |why: &str| {
            Err(Error::usage(format!("`{text}` is no replay token: {why}"))
                .hint("paste the whole token, from `ts1-` to its last digit"))
        };
        let Some(digits) = text.trim().strip_prefix(PREFIX) else {
            return refuse("it does not begin with `ts1-`, the only version that is known");
        };
        let Some(bytes) = parse_hex(digits) else { return refuse("it holds something other than hexadecimal digits") };
        if bytes.len() != PAYLOAD + CHECKSUM {
            return refuse(&format!("{} digits are wanted after `ts1-`", 2 * (PAYLOAD + CHECKSUM)));
        }
        let (payload, sum) = bytes.split_at(PAYLOAD);
        if sum != checksum(payload) {
            return refuse("its checksum does not fit");
        }
        let number = |at: usize| payload[at..at + 8].iter().fold(0, |n, &byte| n << 8 | u64::from(byte));
        let depth = (number(0) >> 24) as u32;
        let order = match payload[0] {
            0 => Schedule::Random,
            1 => Schedule::Pct { depth },
            2 => Schedule::Host,
            3 => Schedule::Adversarial,
            _ => return refuse("its order is unknown"),
        };
        Ok(Self { order: Box::new(order), seed: Seed(number(5)), launch: number(13), fingerprint: number(21) })
    }
}

fn checksum(payload: &[u8]) -> [u8; CHECKSUM] {
    let mut sum = [0; CHECKSUM];
    sum.copy_from_slice(&Sha256::digest(payload)[..CHECKSUM]);
    sum
}

fn parse_hex(digits: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = digits.chars().map(|digit| digit.to_digit(16).map(|digit| digit as u8)).collect();
    digits.map(|digits| digits.chunks(2).map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_survives_the_round_trip() {
        for order in [Schedule::Random, Schedule::Pct { depth: 3 }, Schedule::Host, Schedule::Adversarial] {
            let token = Token::new(&order, Seed(u64::MAX - 5), 71_234, 0x0123_4567_89ab_cdef);
            assert_eq!(token.to_string().parse::<Token>().expect("a token"), token);
            for order in [order, Schedule::Replay(token)] {
                let twice = Schedule::Twice(Box::new(order.clone()));
                assert_eq!(order.to_string().parse::<Schedule>().expect("an order"), order);
                assert_eq!(twice.to_string().parse::<Schedule>().expect("an order"), twice);
                assert!(format!("twice:{twice}").parse::<Schedule>().is_err());
            }
        }
    }

    #[test]
    fn every_damaged_digit_is_an_error_that_says_so() {
        let text = Token::new(&Schedule::Adversarial, Seed(7), 12, 99).to_string();
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] = if bytes[at] == b'5' { b'6' } else { b'5' };
            let damaged = String::from_utf8(bytes).expect("ascii");
            let error = damaged.parse::<Token>().expect_err("a damaged token");
            assert!(error.to_string().contains("is no replay token"), "{error}");
            assert!(error.cure().is_some());
        }
        for cut in 0..text.len() {
            assert!(text[..cut].parse::<Token>().is_err());
        }
        assert!(format!("{text}00").parse::<Token>().is_err());
    }
}
