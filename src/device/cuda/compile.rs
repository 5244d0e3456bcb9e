//! UNSAFE: kernels from source to machine code, through NVRTC, with a cache on disk by content.
//!
//! # Safety
//!
//! [`Program`] owns its handle from creation to drop. Strings that go in are NUL-terminated and live through the call;
//! buffers that come back are allocated with the size that the library names right before. The library's presence is
//! checked first, as the binding panics without it.
#![expect(unsafe_code, reason = "the compiler's interface is C; see the section on safety")]

use std::{ffi::CString, fmt::Write, fs, path::PathBuf};

use cudarc::nvrtc::sys;
use sha2::{Digest, Sha256};

use crate::{
    env,
    error::{Error, Result},
};

/// One kernel file.
pub(super) struct Source {
    pub(super) name: &'static str,
    text: &'static str,
}

const HEADER: &str = "common.cuh";
const HEADER_TEXT: &str = include_str!("../../../kernels/common.cuh");

pub(super) static SOURCES: [Source; 7] = [
    Source { name: "rows.cu", text: include_str!("../../../kernels/rows.cu") },
    Source { name: "matmul.cu", text: include_str!("../../../kernels/matmul.cu") },
    Source { name: "cache.cu", text: include_str!("../../../kernels/cache.cu") },
    Source { name: "logits.cu", text: include_str!("../../../kernels/logits.cu") },
    Source { name: "topk.cu", text: include_str!("../../../kernels/topk.cu") },
    Source { name: "attention.cu", text: include_str!("../../../kernels/attention.cu") },
    Source { name: "canary.cu", text: include_str!("../../../kernels/canary.cu") },
];

/// Hopper's matrix and copy instructions need the architecture's own variant.
fn architecture((major, minor): (i32, i32)) -> String {
    if (major, minor) == (9, 0) { "sm_90a".to_owned() } else { format!("sm_{major}{minor}") }
}

/// The machine code of a file for a device, and the hash of all that it depends on.
pub(super) fn image(source: &Source, capability: (i32, i32)) -> Result<(String, Vec<u8>)> {
    let options = [format!("--gpu-architecture={}", architecture(capability)), "--std=c++17".to_owned()];
    let mut hasher = Sha256::new();
    for part in [source.text, HEADER_TEXT, &options[0], &options[1]] {
        hasher.update(part.as_bytes());
        hasher.update([0]);
    }
    let hash = hasher.finalize().iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    });
    let cached = folder().map(|folder| folder.join(format!("{hash}.cubin")));
    if let Some(image) = cached.as_ref().and_then(|path| fs::read(path).ok()) {
        return Ok((hash, image));
    }
    let image = compile(source, &options)?;
    // The cache only saves time; where it cannot be written, the next start compiles again.
    if let Some(path) = cached {
        let parent = path.parent().map_or(Ok(()), fs::create_dir_all);
        let part = path.with_extension(format!("part{}", std::process::id()));
        let _ = parent.and_then(|()| fs::write(&part, &image)).and_then(|()| fs::rename(&part, &path));
    }
    Ok((hash, image))
}

fn folder() -> Option<PathBuf> {
    let base = env::var("XDG_CACHE_HOME").map(PathBuf::from);
    let base = base.or_else(|| env::var("HOME").map(|home| PathBuf::from(home).join(".cache")))?;
    Some(base.join("toolstorm").join("kernels"))
}

fn compile(source: &Source, options: &[String]) -> Result<Vec<u8>> {
    // SAFETY: looks a library up by its well-known names.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::usage("the CUDA kernels cannot be compiled: NVRTC (libnvrtc.so) is not installed")
            .hint("install CUDA 13's NVRTC (pip install nvidia-cuda-nvrtc==13.0.*) and put it on LD_LIBRARY_PATH"));
    }
    let program = Program::new(source)?;
    let options: Vec<CString> = options.iter().map(|option| text(option)).collect::<Result<_>>()?;
    let pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
    // SAFETY: a live program and an array of live strings.
    let compiled = unsafe { sys::nvrtcCompileProgram(program.0, pointers.len() as i32, pointers.as_ptr()) };
    if compiled != sys::nvrtcResult::NVRTC_SUCCESS {
        return Err(Error::usage(format!("kernels/{} does not compile: {}", source.name, program.log())));
    }
    program.image().ok_or_else(|| Error::usage(format!("kernels/{} has no machine code", source.name)))
}

fn text(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::usage("a kernel source holds a NUL byte"))
}

struct Program(sys::nvrtcProgram);

impl Program {
    fn new(source: &Source) -> Result<Self> {
        let (code, name) = (text(source.text)?, text(source.name)?);
        let (header, header_name) = (text(HEADER_TEXT)?, text(HEADER)?);
        let mut program = std::ptr::null_mut();
        let (headers, names) = ([header.as_ptr()], [header_name.as_ptr()]);
        // SAFETY: all strings live through the call, which copies them; the arrays have the one header announced.
        let created = unsafe {
            sys::nvrtcCreateProgram(&raw mut program, code.as_ptr(), name.as_ptr(), 1, headers.as_ptr(), names.as_ptr())
        };
        if created != sys::nvrtcResult::NVRTC_SUCCESS {
            return Err(Error::usage(format!("NVRTC refused kernels/{}", source.name)));
        }
        Ok(Self(program))
    }

    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: a live program; one integer is written.
        unsafe { sys::nvrtcGetProgramLogSize(self.0, &raw mut size) };
        let mut log = vec![0u8; size];
        // SAFETY: the buffer has the size just named.
        unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) };
        String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned()
    }

    fn image(&self) -> Option<Vec<u8>> {
        let mut size = 0;
        // SAFETY: a compiled program; one integer is written.
        unsafe { sys::nvrtcGetCUBINSize(self.0, &raw mut size) };
        let mut image = vec![0u8; size];
        // SAFETY: the buffer has the size just named.
        let got = unsafe { sys::nvrtcGetCUBIN(self.0, image.as_mut_ptr().cast()) };
        (size > 0 && got == sys::nvrtcResult::NVRTC_SUCCESS).then_some(image)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created in `new` and destroyed once.
        unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "needs NVRTC: run tests/nvrtc.sh"]
    fn every_kernel_compiles_for_every_architecture() {
        for source in &SOURCES {
            for architecture in ["sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"] {
                let options = [format!("--gpu-architecture={architecture}"), "--std=c++17".to_owned()];
                let image = compile(source, &options).unwrap_or_else(|error| panic!("{architecture}: {error}"));
                assert!(image.starts_with(b"\x7fELF"), "{} for {architecture}", source.name);
            }
        }
    }
}
