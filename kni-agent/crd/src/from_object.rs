//! Defines the conversion from a Kubernetes object into a type of the model.

/// A type of the model that is read from a Kubernetes object of type `O`.
///
/// The types and the objects both belong to other crates, so that [`TryFrom`] cannot be implemented here.
pub trait FromObject<O>: Sized {
    /// Names the object, the field, and the violated rule.
    type Error;

    /// Converts and validates the object.
    fn from_object(object: &O) -> Result<Self, Self::Error>;
}
