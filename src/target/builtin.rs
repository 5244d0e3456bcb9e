//! This very binary's `serve` as a child process: the driver meets the engine through HTTP alone.

use std::{process::Stdio, time::Duration};

use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};

use super::{Process, Server, Start, process, program, supervised};
use crate::{
    drive::Endpoint,
    error::{Error, Result},
};

/// The line that `serve` prints when it listens.
#[derive(Deserialize)]
struct Address {
    url: String,
}

pub(super) async fn start(start: &Start<'_>) -> Result<Server> {
    let mut command = supervised(&[program()?])?;
    command.args(["serve", "--port", "0"]).args(start.args);
    command.envs(start.env).stdout(Stdio::piped());
    let mut process = Process::spawn(command, process::log(start.log)?)?;
    let stdout = process.child.stdout.take().ok_or_else(|| Error::usage("the server has no output"))?;
    let wait = start.target.ready.timeout.0;
    let base_url = tokio::time::timeout(wait, address(stdout)).await;
    let failed = |what: &str| {
        let hint = match process::tail(start.log) {
            tail if tail.is_empty() => format!("its log {} is empty", start.log.display()),
            tail => format!("the end of {}:\n{tail}", start.log.display()),
        };
        Error::usage(format!("the server of arm `{}` {what}", start.arm)).hint(hint)
    };
    match base_url {
        Err(_) => Err(failed(&format!("did not listen within {}", start.target.ready.timeout))),
        Ok(None) => {
            // Its last words may still be on their way into the log.
            let _ = tokio::time::timeout(Duration::from_secs(1), process.child.wait()).await;
            Err(failed("ended before it listened"))
        }
        Ok(Some(base_url)) => {
            let endpoint = Endpoint { base_url, api_key: None };
            Ok(Server { endpoint, process: Some(process) })
        }
    }
}

/// Reads lines until one is an address; what follows is read to the end and dropped, so that the server never blocks.
async fn address(stdout: impl AsyncRead + Unpin + Send + 'static) -> Option<String> {
    let mut lines = BufReader::new(stdout).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        if let Ok(address) = serde_json::from_str::<Address>(&line) {
            tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
            return Some(address.url.trim_end_matches('/').to_owned());
        }
    }
    None
}
