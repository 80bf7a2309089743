package proxy

// Attach implements routing.Canceler: what is done for the request before it has
// a replica is broken off when the client leaves.
func (x *exchange) Attach(cancel func()) bool { return x.c.attach(cancelFunc(cancel)) }

// Detach implements routing.Canceler.
func (x *exchange) Detach() { x.c.detach() }
