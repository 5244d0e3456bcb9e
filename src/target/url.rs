//! A server that someone else runs.

use super::{Server, Start, api_key, base_url};
use crate::{
    drive::Endpoint,
    error::{Error, Result},
};

pub(super) fn start(start: &Start<'_>) -> Result<Server> {
    let address = start.base_url.or(start.target.base_url.as_deref());
    let address = address.ok_or_else(|| Error::usage(format!("arm `{}` has no `base_url`", start.arm)))?;
    let endpoint = Endpoint { base_url: base_url(address)?, api_key: api_key(start.target)? };
    Ok(Server { endpoint, process: None })
}
