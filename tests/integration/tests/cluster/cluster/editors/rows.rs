//! Collects the rows of all classes, and provides the parts that their attempts have in common.

mod accounts;
mod attachments;
mod foreign;
mod names;
mod pods;
mod policies;
mod services;

use kni_integration::cluster::objects;
use serde_json::{Value, json};

use super::{
    super::request::{Request, Verb},
    row::{Form, Row},
    scene::ATTEMPT,
};

/// All rows, class by class.
pub(super) fn all() -> Vec<Row> {
    let classes = [
        pods::rows(),
        services::rows(),
        policies::rows(),
        attachments::rows(),
        accounts::rows(),
        names::rows(),
        foreign::rows(),
    ];
    classes.into_iter().flatten().collect()
}

/// A request that creates the object, with the label of all attempts.
fn make(mut object: Value) -> Request {
    object["metadata"]["labels"][ATTEMPT] = json!("yes");
    Request::create(&object).expect("an object of a known kind")
}

fn request(verb: Verb, path: &str, body: Value) -> Request {
    Request::new(verb, path, body)
}

/// A pod of the editor on its node.
fn pod(form: &Form, name: &str, more: &Value) -> Value {
    objects::pod_with(&form.namespace, name, &form.node, more)
}

/// A pod of the editor with annotations.
fn annotated(form: &Form, annotations: &Value) -> Vec<Request> {
    vec![make(pod(form, "attempt", &json!({ "annotations": annotations })))]
}

/// A Service of the editor in the default network, and its slice with the pod that the namespace has; `spec` is merged
/// into the spec.
fn service(form: &Form, name: &str, spec: &Value) -> [Value; 2] {
    let [mut service, mut slice] =
        objects::service(&form.namespace, name, 80, (&form.probe.to_string(), 7000), &json!({}));
    objects::merge(&mut service["spec"], spec);
    slice["endpoints"][0]["nodeName"] = json!(form.node);
    [service, slice]
}

/// The requests that create a Service and its slice.
fn served(objects: [Value; 2]) -> Vec<Request> {
    objects.into_iter().map(make).collect()
}
