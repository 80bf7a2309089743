package scrape

import (
	"context"
	"errors"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"kvgate/routing"
)

// A vLLM whose endpoint has no wildcard connects to us. Then one address may be
// bound for many replicas, and the topic of its first message tells which one it is.

// maxInbound is how many publishers may be connected to one address.
const maxInbound = 1024

// kvListener binds one address for the replicas of a group.
type kvListener struct {
	group   *kvGroup
	address zmqAddress
	cancel  context.CancelFunc
	done    chan struct{}

	mu      sync.Mutex
	inbound []*kvInbound
	warned  bool
}

// kvInbound is a replica that connects.
type kvInbound struct {
	k      *kvWorker
	offers chan kvOffer
}

// kvOffer is a publisher that has connected and has said who it is.
type kvOffer struct {
	conn  *zmtpConn
	first *kvMessage
	rank  int
}

// join registers a replica at an address, which is bound for the first one.
func (g *kvGroup) join(in *kvInbound, a zmqAddress) {
	g.mu.Lock()
	defer g.mu.Unlock()
	i := slices.IndexFunc(g.listeners, func(l *kvListener) bool { return l.address == a })
	if i < 0 {
		l := &kvListener{group: g, address: a, done: make(chan struct{}), inbound: []*kvInbound{in}}
		var ctx context.Context
		ctx, l.cancel = context.WithCancel(context.Background()) // ended by the last leave
		g.listeners = append(g.listeners, l)
		go l.run(ctx)
		return
	}
	l := g.listeners[i]
	l.mu.Lock()
	l.inbound = append(l.inbound, in)
	l.mu.Unlock()
}

// leave takes a replica out; the last one closes the listener and waits for its end.
func (g *kvGroup) leave(in *kvInbound, a zmqAddress) {
	g.mu.Lock()
	i := slices.IndexFunc(g.listeners, func(l *kvListener) bool { return l.address == a })
	l := g.listeners[i]
	l.mu.Lock()
	l.inbound = slices.DeleteFunc(l.inbound, func(x *kvInbound) bool { return x == in })
	last := len(l.inbound) == 0
	l.mu.Unlock()
	if last {
		g.listeners = slices.Delete(g.listeners, i, i+1)
	}
	g.mu.Unlock()
	if last {
		l.cancel()
		<-l.done
	}
}

// run binds the address, again and again if need be, and serves who connects.
func (l *kvListener) run(ctx context.Context) {
	defer close(l.done)
	log := l.group.hub.log.With(zap.String("address", l.address.String()))
	var open sync.WaitGroup
	defer open.Wait()
	places := make(chan struct{}, maxInbound)
	failed := false
	for ; ctx.Err() == nil; sleep(ctx, l.group.hub.times.listen) {
		if info, err := os.Lstat(l.address.address); l.address.network == "unix" && err == nil && info.Mode().Type() == os.ModeSocket {
			_ = os.Remove(l.address.address) // what a process that was killed has left
		}
		ln, err := net.Listen(l.address.network, l.address.address)
		if err != nil {
			if !failed {
				log.Error("cannot listen for publishers of KV events", zap.Error(err))
			}
			failed = true
			continue
		}
		failed = false
		log.Info("listening for publishers of KV events")
		stop := context.AfterFunc(ctx, func() { _ = ln.Close() })
		for {
			nc, err := ln.Accept()
			if err != nil {
				break
			}
			select {
			case places <- struct{}{}:
				open.Go(func() {
					defer func() { <-places }()
					l.serve(ctx, nc)
				})
			default:
				_ = nc.Close()
			}
		}
		stop()
		_ = ln.Close()
	}
}

// serve waits for the first message of a publisher and hands the connection to whom it is for.
func (l *kvListener) serve(ctx context.Context, nc net.Conn) {
	c, err := shakeZMTP(ctx, nc, "SUB", "PUB", "XPUB")
	if err == nil {
		err = l.group.subscribe(c)
	}
	if err != nil {
		l.group.hub.log.Debug("a publisher of KV events failed", zap.Stringer("remote", nc.RemoteAddr()), zap.Error(err))
		return
	}
	stop := context.AfterFunc(ctx, c.close)
	m := l.group.hub.messages.get()
	for {
		bad, err := m.read(c)
		if err != nil {
			stop()
			c.close()
			l.group.hub.messages.put(m)
			return
		}
		if bad == "" {
			break
		}
	}
	offer := kvOffer{conn: c, first: m}
	if d := l.group.borrow(ctx); d != nil {
		if d.decode(m.payload()) == nil {
			offer.rank = max(0, d.rank)
		}
		l.group.giveBack(d)
	}
	stop()
	if offer.rank >= maxKVRanks || !l.offer(offer) {
		l.refuse(c, m.topic())
		l.group.hub.messages.put(m)
	}
}

// offer gives a connection to the replica it belongs to, and reports whether there is one.
func (l *kvListener) offer(o kvOffer) bool {
	e := l.whose(o)
	if e == nil {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, in := range l.inbound {
		if in.k.w.endpoint != e {
			continue
		}
		select {
		case in.offers <- o:
			return true
		default: // it is flooded with connections
		}
	}
	o.conn.close() // its replica is not ready for it: it will connect again
	return true
}

// whose finds the replica that a publisher belongs to: the one that its topic
// names, the only one on its host, the only one there is. It asks the fleet, not those
// that have joined: while they join, one of many would be the only one.
func (l *kvListener) whose(o kvOffer) *routing.Endpoint {
	pod, _ := splitTopic(o.first.topic())
	remote := ""
	if a, ok := o.conn.nc.RemoteAddr().(*net.TCPAddr); ok {
		remote = a.IP.String()
	}
	all := l.group.hub.fleet.Endpoints()
	candidates := slices.DeleteFunc(slices.Clone(all), func(e *routing.Endpoint) bool { return !l.serves(e) })
	named := slices.ContainsFunc(all, func(e *routing.Endpoint) bool { return namedBy(e, pod) })
	for _, fits := range []func(e *routing.Endpoint) bool{
		func(e *routing.Endpoint) bool { return namedBy(e, pod) },
		func(e *routing.Endpoint) bool { return !named && len(pod) > 0 && hostOf(e) == string(pod) },
		func(e *routing.Endpoint) bool { return !named && remote != "" && hostOf(e) == remote },
		func(*routing.Endpoint) bool { return !named },
	} {
		var found *routing.Endpoint
		n := 0
		for _, e := range candidates {
			if fits(e) {
				found = e
				n++
			}
		}
		if n == 1 {
			return found
		}
	}
	return nil
}

// serves tells whether a replica connects to this address, by its label or, without one, by the configuration.
func (l *kvListener) serves(e *routing.Endpoint) bool {
	addresses, labelled := e.Label(kvEventsLabel)
	if !labelled || addresses == "" {
		addresses = l.group.source.Config.ZMQEndpoint
	}
	for s := range strings.SplitSeq(addresses, ",") {
		if a, err := parseZMQ(strings.TrimSpace(s)); err == nil && a == l.address {
			return true
		}
	}
	return false
}

func hostOf(e *routing.Endpoint) string {
	u, _ := url.Parse(e.URL()) // a fleet's URLs are normalized
	return u.Hostname()
}

// refuse closes a connection that belongs to nobody.
func (l *kvListener) refuse(c *zmtpConn, topic []byte) {
	l.mu.Lock()
	first := !l.warned
	l.warned = true
	l.mu.Unlock()
	if first {
		l.group.hub.log.Warn("a publisher of KV events belongs to no replica: set its topic to kv@<name or host:port of the replica>@<model>",
			zap.Stringer("remote", c.nc.RemoteAddr()), zap.ByteString("topic", topic), zap.String("address", l.address.String()))
	}
	c.close()
}

// accept follows the ranks of a replica that connects, until ctx ends.
func (k *kvWorker) accept(ctx context.Context, want kvWant) {
	in := &kvInbound{k: k, offers: make(chan kvOffer, 16)}
	want.group.join(in, want.events)
	type slot struct {
		conns chan kvOffer
		last  *zmtpConn
	}
	slots := make(map[int]*slot) // by rank
	var streams sync.WaitGroup
	defer func() {
		want.group.leave(in, want.events)
		for _, s := range slots {
			s.last.close()
		}
		streams.Wait()
		for {
			select {
			case o := <-in.offers:
				o.conn.close()
			default:
				return
			}
		}
	}()
	for {
		var o kvOffer
		select {
		case o = <-in.offers:
		case <-ctx.Done():
			return
		}
		s := slots[o.rank]
		if s == nil {
			s = &slot{conns: make(chan kvOffer, 1)}
			slots[o.rank] = s
			streams.Go(func() { k.stream(want, o.rank, inboundOf(want.group, s.conns)).run(ctx) })
		} else {
			s.last.close() // the publisher has connected anew
		}
		s.last = o.conn
		select {
		case <-s.conns: // closed just now
		default:
		}
		s.conns <- o
	}
}

// inboundOf returns the connect function of a stream whose publisher connects.
func inboundOf(g *kvGroup, conns <-chan kvOffer) func(context.Context) (*zmtpConn, *kvMessage, error) {
	return func(ctx context.Context) (*zmtpConn, *kvMessage, error) {
		t := time.NewTimer(g.hub.times.lost)
		defer t.Stop()
		select {
		case o := <-conns:
			return o.conn, o.first, nil
		case <-t.C:
			return nil, nil, errNoPublisher
		case <-ctx.Done():
			return nil, nil, errors.Join(errNoPublisher, ctx.Err())
		}
	}
}
