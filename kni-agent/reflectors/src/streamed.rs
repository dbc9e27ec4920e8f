//! Asks for lists that arrive as the beginning of a watch as they are now.

use http::{Request, Uri, uri::PathAndQuery};
use kube::client::Body;

/// kube begins such a watch at version 0: any state that a cache of the API server has. A list must not be older than
/// what the agent has written before, so the version is left out, which asks for the newest state.
pub(super) fn newest(mut request: Request<Body>) -> Request<Body> {
    if let Some(uri) = of_newest(request.uri()) {
        *request.uri_mut() = uri;
    }
    request
}

/// The URI without the version; `None` if the request is another one.
fn of_newest(uri: &Uri) -> Option<Uri> {
    let query = uri.query()?;
    if !query.split('&').any(|part| part == "sendInitialEvents=true") {
        return None;
    }
    let parts: Vec<&str> = query.split('&').filter(|part| *part != "resourceVersion=0").collect();
    let mut parsed = uri.clone().into_parts();
    let path = format!("{}?{}", uri.path(), parts.join("&"));
    parsed.path_and_query = Some(PathAndQuery::try_from(path).ok()?);
    Uri::from_parts(parsed).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(uri: &str) -> Option<String> {
        of_newest(&uri.parse().unwrap()).map(|uri| uri.to_string())
    }

    #[test]
    fn a_streamed_list_is_the_newest_and_nothing_else_changes() {
        let list = "https://[::1]:6443/api/v1/pods?&watch=true&labelSelector=a%3Db&sendInitialEvents=true\
            &resourceVersionMatch=NotOlderThan&resourceVersion=0";
        let expected = "https://[::1]:6443/api/v1/pods?&watch=true&labelSelector=a%3Db&sendInitialEvents=true\
            &resourceVersionMatch=NotOlderThan";
        assert_eq!(changed(list).as_deref(), Some(expected));
        for other in [
            "/api/v1/pods?&watch=true&resourceVersion=0",
            "/api/v1/pods?&watch=true&resourceVersion=17",
            "/api/v1/pods?&limit=500&resourceVersion=0",
            "/api/v1/nodes/a",
        ] {
            assert_eq!(changed(other), None, "{other}");
        }
    }
}
