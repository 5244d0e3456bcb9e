//! Number formats, bit for bit as a GPU rounds them, and dispatch to the host's widest vectors.

use std::sync::OnceLock;

use pulp::Arch;

/// Evaluates an expression, compiled once more for each instruction set that the host may have. Only what inlines gains: the
/// closure that this makes of it always does, and what it calls must be `#[inline(always)]`.
macro_rules! vectorised {
    ($work:expr $(,)?) => {
        $crate::device::sim::reference::numeric::dispatch(
            #[inline(always)]
            || $work,
        )
    };
}
pub(super) use vectorised;

/// What [`vectorised`] calls.
pub(super) fn dispatch<R>(work: impl FnOnce() -> R) -> R {
    static ARCH: OnceLock<Arch> = OnceLock::new();
    ARCH.get_or_init(Arch::new).dispatch(work)
}

/// An element of a matrix in memory.
pub(super) trait Element: bytemuck::Pod {
    /// Its value.
    fn get(self) -> f32;
    /// The nearest element to `value`, ties to even.
    fn put(value: f32) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    fn get(self) -> f32 {
        self
    }

    #[inline(always)]
    fn put(value: f32) -> Self {
        value
    }
}

/// bf16.
impl Element for u16 {
    #[inline(always)]
    fn get(self) -> f32 {
        f32::from_bits(u32::from(self) << 16)
    }

    #[inline(always)]
    fn put(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1))) >> 16;
        let quiet_nan = bits >> 16 | 0x40;
        (if bits & 0x7fff_ffff > 0x7f80_0000 { quiet_nan } else { rounded }) as Self
    }
}

/// e4m3 (the finite-only variant: largest 448, no infinity).
pub(super) mod e4m3 {
    const NAN: u8 = 0x7f;
    const LARGEST: u32 = 0x7e;

    const DECODED: [f32; 256] = {
        let mut table = [0.0; 256];
        let mut code = 0;
        while code < 256 {
            let (exponent, mantissa) = (code >> 3 & 15, code & 7);
            // Both products are exact: a small integer times a power of two.
            let magnitude = if exponent == 0 {
                mantissa as f32 / 512.0
            } else {
                (8 + mantissa) as f32 * (1u32 << exponent) as f32 / 1024.0
            };
            let magnitude = if code & 0x7f == NAN as usize { f32::NAN } else { magnitude };
            table[code] = if code & 0x80 == 0 { magnitude } else { -magnitude };
            code += 1;
        }
        table
    };

    /// The value of a code.
    #[inline(always)]
    pub(in super::super) fn decode(code: u8) -> f32 {
        DECODED[code as usize]
    }

    /// The nearest code, ties to even, saturating. Without branches, so that a loop of it becomes vectors.
    #[inline(always)]
    pub(in super::super) fn encode(value: f32) -> u8 {
        /// Added to a smaller number, leaves its nearest whole number in the low bits.
        const WHOLE: f32 = 12_582_912.0;
        let bits = value.to_bits();
        let (sign, magnitude) = (bits >> 24 & 0x80, bits & 0x7fff_ffff);
        let absolute = f32::from_bits(magnitude);
        let subnormal = (absolute.min(1.0 / 64.0) * 512.0 + WHOLE).to_bits() & 0xff;
        let rounded = (magnitude + 0x7_ffff + (magnitude >> 20 & 1)) >> 20;
        let normal = rounded.saturating_sub(120 << 3).min(LARGEST);
        let code = if absolute < 1.0 / 64.0 { subnormal } else { normal };
        let code = if magnitude > 0x7f80_0000 { NAN as u32 } else { code };
        (sign | code) as u8
    }
}

/// The scale of a quantised group: its largest magnitude becomes the format's largest.
#[inline(always)]
pub(super) fn quantisation_scale(largest: f32) -> f32 {
    largest.max(1e-4) / 448.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_agrees_with_half() {
        for step in 0..=u32::MAX / 65_521 {
            let value = f32::from_bits(step * 65_521);
            let ours = <u16 as Element>::put(value);
            assert_eq!(ours, half::bf16::from_f32(value).to_bits(), "{value:e}");
            assert_eq!(ours.get().to_bits(), half::bf16::from_bits(ours).to_f32().to_bits());
        }
    }

    #[test]
    fn e4m3_rounds_to_the_nearest_code() {
        for code in 0..=255u8 {
            let value = e4m3::decode(code);
            if !value.is_nan() {
                assert_eq!(e4m3::encode(value), code);
            }
        }
        let positive: Vec<f64> = (0..=0x7e_u8).map(|code| f64::from(e4m3::decode(code))).collect();
        for step in 0..60_000 {
            let value = f64::from(step) * 0.009;
            let code = usize::from(e4m3::encode(value as f32));
            let near = |at: usize| (positive[at] - f64::from(value as f32)).abs();
            assert!(code == 0 || near(code) <= near(code - 1), "{value} became {}", positive[code]);
            assert!(code == 0x7e || near(code) <= near(code + 1), "{value} became {}", positive[code]);
        }
        for (tie, even) in [(0.5, 0), (1.5, 2), (2.5, 2), (7.5, 8)] {
            assert_eq!(e4m3::encode(tie / 512.0), even);
        }
        assert_eq!(e4m3::encode(-f32::INFINITY), 0x80 | 0x7e);
        assert_eq!(e4m3::decode(0x38), 1.0);
        assert_eq!(e4m3::decode(e4m3::encode(1e9)), 448.0);
        assert_eq!(e4m3::decode(e4m3::encode(-1e9)), -448.0);
        assert!(e4m3::decode(e4m3::encode(f32::NAN)).is_nan());
    }
}
