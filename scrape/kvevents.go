package scrape

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kvgate/routing"
)

// Labels of a replica that say where its KV events are: one address, or one per
// rank, separated by commas. A wildcard host means that the replica connects to kvgate.
const (
	kvEventsLabel = "kvgate.io/kv-events"
	kvReplayLabel = "kvgate.io/kv-replay"
)

const (
	// kvSourcesInterval is how often a replica is asked where it publishes.
	kvSourcesInterval = 30 * time.Second
	// defaultKVPort is the port that an engine publishes on, and that of a configuration that says nothing.
	defaultKVPort = 5557
	maxKVRanks    = 256
)

// kvHub holds what all subscriptions share.
type kvHub struct {
	fleet    *routing.Fleet
	times    kvTimes
	dial     dialFunc
	log      *zap.Logger
	messages kvMessages
	replays  chan struct{} // a place per replay under way
	groups   atomic.Pointer[[]*kvGroup]
}

func newKVHub(fleet *routing.Fleet, dial dialFunc, log *zap.Logger) *kvHub {
	h := &kvHub{fleet: fleet, times: defaultKVTimes(), dial: dial, log: log, replays: make(chan struct{}, maxKVReplays)}
	h.groups.Store(new([]*kvGroup))
	return h
}

// kvGroup is all that is subscribed to for one producer.
type kvGroup struct {
	hub      *kvHub
	source   routing.KVEventSource
	decoders chan *kvDecoder // as many as decode at once

	mu        sync.Mutex
	listeners []*kvListener
}

func newKVGroup(h *kvHub, s routing.KVEventSource) *kvGroup {
	g := &kvGroup{hub: h, source: s, decoders: make(chan *kvDecoder, max(1, s.Config.Concurrency))}
	for range cap(g.decoders) {
		g.decoders <- &kvDecoder{}
	}
	return g
}

// borrow waits for a decoder, first come first served; nil when ctx ends.
func (g *kvGroup) borrow(ctx context.Context) *kvDecoder {
	select {
	case d := <-g.decoders:
		return d
	case <-ctx.Done():
		return nil
	}
}

func (g *kvGroup) giveBack(d *kvDecoder) {
	d.release()
	g.decoders <- d
}

// SetKVEvents subscribes to the KV events that producers want: those of
// routing.Router.KVEventSources, at the start and after each change of the
// router. A source whose Sink and Config are the same as before goes on.
func (m *Manager) SetKVEvents(sources []routing.KVEventSource) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return
	}
	old := *m.kv.groups.Load()
	next := make([]*kvGroup, 0, len(sources))
	for _, s := range sources {
		i := slices.IndexFunc(old, func(g *kvGroup) bool { return g.source.Sink == s.Sink && g.source.Config == s.Config })
		if i >= 0 {
			next = append(next, old[i])
		} else {
			next = append(next, newKVGroup(m.kv, s))
		}
	}
	m.kv.groups.Store(&next)
	for _, w := range m.workers {
		w.poke()
	}
}

// kvWant is one subscription that ought to be.
type kvWant struct {
	group   *kvGroup
	rank    int        // -1: the replica connects, and its batches tell the rank
	events  zmqAddress // where the publisher is, or what is bound for it
	replays string     // one address per rank, separated by commas: comparable
}

// replay returns the replay server of a rank, nil when there is none.
func (k kvWant) replay(rank int) *zmqAddress {
	all := strings.Split(k.replays, ",")
	if k.rank >= 0 {
		rank = 0 // they are this rank's alone
	}
	if rank >= len(all) {
		return nil
	}
	a, err := parseZMQ(strings.TrimSpace(all[rank]))
	if err != nil {
		return nil // empty: all others were checked when the want was made
	}
	return &a
}

// kvSubscription is a kvWant that is followed.
type kvSubscription struct {
	kvWant
	cancel context.CancelFunc
	done   chan struct{}
}

// kvReport is what a replica says about its publishers.
type kvReport struct {
	known   bool // it has answered
	page    bool // it has such a page
	sources []kvSource
}

// kvSource is the publisher of one rank as GET /kv_event_sources shows it.
type kvSource struct {
	rank    int
	enabled bool
	events  string
	replay  string
	topic   string
}

func (r kvReport) equal(o kvReport) bool {
	return r.known == o.known && r.page == o.page && slices.Equal(r.sources, o.sources)
}

// parseKVSources reads the answer of GET /kv_event_sources.
func parseKVSources(body []byte) ([]kvSource, error) {
	var doc map[string]struct {
		Enabled   *bool   `json:"enable_kv_cache_events"`
		Publisher *string `json:"publisher"`
		Endpoint  string  `json:"endpoint"`
		Replay    *string `json:"replay_endpoint"`
		Topic     string  `json:"topic"`
	}
	if err := json.Unmarshal(body, &doc); err != nil {
		return nil, err
	}
	out := make([]kvSource, 0, len(doc))
	for key, d := range doc {
		rank, err := strconv.Atoi(key)
		if err != nil || rank < 0 || rank >= maxKVRanks {
			return nil, fmt.Errorf("%q is no rank from 0 to %d", key, maxKVRanks-1)
		}
		s := kvSource{rank: rank, enabled: true, events: d.Endpoint, topic: d.Topic}
		if d.Enabled != nil && !*d.Enabled || d.Publisher != nil && *d.Publisher != "zmq" {
			s.enabled = false
		}
		if d.Replay != nil {
			s.replay = *d.Replay
		}
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b kvSource) int { return a.rank - b.rank })
	return out, nil
}

// kvWorker keeps the subscriptions of one endpoint. It belongs to the endpoint's
// worker: the same goroutine starts and joins all of them, so that two never
// speak for the same rank.
type kvWorker struct {
	w        *worker
	counts   kvCounts
	page     *target
	pageBy   *client
	report   kvReport
	reportAt time.Time
	misses   int // failed reads of the page in a row

	// What the subscriptions were made from.
	groups         *[]*kvGroup
	events, replay string
	from           kvReport
	subs           []*kvSubscription
	problem        string
}

// step asks the replica where it publishes, if somebody wants to know, makes
// the subscriptions what they ought to be, and returns when there is more to do; zero: nothing.
func (k *kvWorker) step() time.Time {
	groups := k.w.m.kv.groups.Load()
	if len(*groups) == 0 && len(k.subs) == 0 {
		k.groups = groups
		return time.Time{}
	}
	next := time.Time{}
	if slices.ContainsFunc(*groups, k.asks) {
		if !k.reportAt.After(time.Now()) {
			k.readSources()
		}
		next = k.reportAt
	}
	if k.w.ctx.Err() != nil {
		return next
	}
	events, _ := k.w.endpoint.Label(kvEventsLabel)
	replay, _ := k.w.endpoint.Label(kvReplayLabel)
	if groups == k.groups && events == k.events && replay == k.replay && k.report.equal(k.from) {
		return next
	}
	k.groups, k.events, k.replay, k.from = groups, events, replay, k.report
	k.reconcile()
	return next
}

// asks tells whether a group depends on what the replica says. SGLang has no such page.
func (k *kvWorker) asks(g *kvGroup) bool {
	if label, _ := k.w.endpoint.Label(kvEventsLabel); label != "" {
		return false
	}
	return g.source.Config.Engine != "sglang" && (g.discovers(k.w.endpoint) || g.source.Config.ZMQEndpoint != "")
}

// discovers tells whether the group wants to find the publisher of an endpoint by itself.
func (g *kvGroup) discovers(e *routing.Endpoint) bool {
	c := &g.source.Config
	namespace, _, _ := strings.Cut(e.ID(), "/")
	return c.DiscoverPods && (c.Namespace == "" || c.Namespace == namespace)
}

// readSources asks the replica for its publishers.
func (k *kvWorker) readSources() {
	p, r, err := k.w.get(k.pageBy, k.page)
	if k.w.ctx.Err() != nil {
		k.w.m.pages.put(p)
		return
	}
	k.reportAt = time.Now().Add(jitter(kvSourcesInterval))
	switch r {
	case resultOK:
		sources, err := parseKVSources(p.body)
		k.w.m.pages.put(p)
		if err != nil {
			k.w.log.Debug("no list of KV event publishers", zap.Error(err))
		}
		k.report, k.misses = kvReport{known: true, page: err == nil, sources: sources}, 0
	case resultNoMetrics, resultStatus, resultTooLarge:
		k.report, k.misses = kvReport{known: true}, 0
	default: // what it said before stays
		k.w.log.Debug("cannot ask for KV event publishers", zap.Error(err))
		k.reportAt = time.Now().Add(backoff(time.Second, k.misses))
		k.misses++
	}
}

// reconcile stops what is not wanted any more and starts what is.
func (k *kvWorker) reconcile() {
	var want []kvWant
	problem := ""
	for _, g := range *k.groups {
		w, err := g.wants(k.w.endpoint, k.events, k.replay, k.report)
		want = append(want, w...)
		if err != nil {
			problem = err.Error()
			if problem != k.problem {
				k.w.log.Warn("no KV events from the replica", zap.Error(err))
			}
			if len(w) == 0 {
				g.source.Sink.Incomplete(k.w.endpoint, 0, problem)
			}
		}
	}
	k.problem = problem
	k.subs = slices.DeleteFunc(k.subs, func(s *kvSubscription) bool {
		if slices.Contains(want, s.kvWant) {
			return false
		}
		s.stop()
		if slices.Contains(*k.groups, s.group) {
			s.group.source.Sink.Incomplete(k.w.endpoint, max(0, s.rank), "not subscribed any more")
		}
		return true
	})
	for _, w := range want {
		if !slices.ContainsFunc(k.subs, func(s *kvSubscription) bool { return s.kvWant == w }) {
			k.subs = append(k.subs, k.subscribe(w))
		}
	}
}

// stop ends all subscriptions and waits for their end.
func (k *kvWorker) stop() {
	for _, s := range k.subs {
		s.cancel()
	}
	for _, s := range k.subs {
		<-s.done
	}
	k.subs = nil
}

func (s *kvSubscription) stop() {
	s.cancel()
	<-s.done
}

// subscribe starts to follow one publisher, or those of all ranks that connect.
func (k *kvWorker) subscribe(want kvWant) *kvSubscription {
	s := &kvSubscription{kvWant: want, done: make(chan struct{})}
	var ctx context.Context
	ctx, s.cancel = context.WithCancel(k.w.ctx)
	g := want.group
	go func() {
		defer close(s.done)
		defer s.cancel()
		if want.rank < 0 {
			k.accept(ctx, want)
			return
		}
		k.stream(want, want.rank, func(ctx context.Context) (*zmtpConn, *kvMessage, error) {
			c, err := dialZMTP(ctx, g.hub.dial, want.events, "SUB", "PUB", "XPUB")
			if err != nil {
				return nil, nil, fmt.Errorf("%s: %w", want.events, err)
			}
			return c, nil, g.subscribe(c)
		}).run(ctx)
	}()
	return s
}

// subscribe asks a publisher for events, and for a sign that it has understood.
func (g *kvGroup) subscribe(c *zmtpConn) error {
	err := c.subscribe(g.source.Config.TopicFilter)
	if err == nil {
		err = c.ping()
	}
	if err != nil {
		c.close()
	}
	return err
}

func (k *kvWorker) stream(want kvWant, rank int, connect func(context.Context) (*zmtpConn, *kvMessage, error)) *kvStream {
	return &kvStream{
		group: want.group, endpoint: k.w.endpoint, rank: rank, replay: want.replay(rank), counts: &k.counts, connect: connect,
		log: k.w.log.With(zap.String("producer", want.group.source.Producer), zap.Int("rank", rank)),
	}
}

// wants says where an endpoint publishes for this group: by its labels, by what
// it says itself, by the configured ports. An error says why not.
func (g *kvGroup) wants(e *routing.Endpoint, events, replay string, report kvReport) ([]kvWant, error) {
	c := &g.source.Config
	if err := checkReplays(replay); err != nil {
		return nil, err
	}
	if events != "" {
		return g.labelled(events, replay)
	}
	u, _ := url.Parse(e.URL()) // a fleet's URLs are normalized
	replays := replay
	if replays == "" {
		replays = g.replays(u.Hostname(), report)
	}
	inbound := func() ([]kvWant, error) {
		a, err := parseZMQ(c.ZMQEndpoint)
		if err != nil {
			return nil, fmt.Errorf("zmqEndpoint: %w", err)
		}
		return []kvWant{{group: g, rank: -1, events: a, replays: replays}}, nil
	}
	vague := !report.page || len(report.sources) == 0
	switch {
	case !g.discovers(e) || vague && c.ZMQEndpoint != "":
		if c.ZMQEndpoint == "" {
			return nil, nil
		}
		return inbound()
	case !report.known && c.Engine != "sglang":
		return nil, nil // it has not been asked yet
	case report.page && len(report.sources) == 0:
		return nil, errors.New("GET /kv_event_sources names no publisher: start the engine with --kv-events-config, or set the label " + kvEventsLabel)
	case vague:
		w := kvWant{group: g, events: zmqAddress{network: "tcp", address: net.JoinHostPort(u.Hostname(), strconv.Itoa(c.SocketPort))}}
		if w.replays = replay; replay == "" && c.ReplayPort > 0 {
			w.replays = zmqAddress{network: "tcp", address: net.JoinHostPort(u.Hostname(), strconv.Itoa(c.ReplayPort))}.String()
		}
		return []kvWant{w}, nil
	}
	var out []kvWant
	var problems []error
	for _, s := range report.sources {
		a, err := parseZMQ(s.events)
		switch {
		case !s.enabled:
			problems = append(problems, fmt.Errorf("rank %d publishes no KV events: start the engine with enable_kv_cache_events in --kv-events-config", s.rank))
			continue
		case !strings.HasPrefix(s.topic, c.TopicFilter):
			problems = append(problems, fmt.Errorf("rank %d publishes under the topic %q, which topicFilter %q leaves out: change one of them", s.rank, s.topic, c.TopicFilter))
			continue
		case err != nil || a.network != "tcp":
			problems = append(problems, fmt.Errorf("rank %d publishes on %q, which cannot be reached from here: use TCP, or set the label %s", s.rank, s.events, kvEventsLabel))
			continue
		}
		_, port, _ := net.SplitHostPort(a.address)
		if bound, err := parseZMQ(c.ZMQEndpoint); err == nil && !a.bind && strings.HasSuffix(bound.address, ":"+port) {
			return inbound() // that is where kvgate listens: the replica connects
		}
		if c.SocketPort != defaultKVPort {
			port = strconv.Itoa(c.SocketPort + s.rank)
		}
		// The host is the registry's, whatever the replica calls itself.
		w := kvWant{group: g, rank: s.rank, events: zmqAddress{network: "tcp", address: net.JoinHostPort(u.Hostname(), port)}}
		if all := strings.Split(replays, ","); s.rank < len(all) {
			w.replays = all[s.rank]
		}
		out = append(out, w)
	}
	return out, errors.Join(problems...)
}

// checkReplays checks the label of replay servers.
func checkReplays(label string) error {
	for s := range strings.SplitSeq(label, ",") {
		if a, err := parseZMQ(strings.TrimSpace(s)); strings.TrimSpace(s) != "" && (err != nil || a.bind) {
			return fmt.Errorf("label %s: %q is no address to connect to: write tcp://host:port", kvReplayLabel, s)
		}
	}
	return nil
}

// labelled reads the labels of an endpoint.
func (g *kvGroup) labelled(events, replay string) ([]kvWant, error) {
	all, replays := strings.Split(events, ","), strings.Split(replay, ",")
	if replay != "" && len(replays) != len(all) {
		return nil, fmt.Errorf("label %s: %d addresses, and %d of %s: write one for each", kvReplayLabel, len(replays), len(all), kvEventsLabel)
	}
	if len(all) > maxKVRanks {
		return nil, fmt.Errorf("label %s: %d addresses: at most %d ranks", kvEventsLabel, len(all), maxKVRanks)
	}
	var out []kvWant
	for rank, s := range all {
		a, err := parseZMQ(strings.TrimSpace(s))
		if err != nil {
			return nil, fmt.Errorf("label %s: %w", kvEventsLabel, err)
		}
		w := kvWant{group: g, rank: rank, events: a}
		if rank < len(replays) {
			w.replays = replays[rank]
		}
		if a.bind {
			w.rank, w.replays = -1, replay
		}
		if !slices.Contains(out, w) {
			out = append(out, w)
		}
	}
	return out, nil
}

// replays returns the replay servers that a replica names, or those of the configured port, by rank.
func (g *kvGroup) replays(host string, report kvReport) string {
	port := g.source.Config.ReplayPort
	if len(report.sources) == 0 {
		if port == 0 {
			return ""
		}
		return zmqAddress{network: "tcp", address: net.JoinHostPort(host, strconv.Itoa(port))}.String()
	}
	all := make([]string, report.sources[len(report.sources)-1].rank+1)
	for _, s := range report.sources {
		own := ""
		if a, err := parseZMQ(s.replay); err == nil && a.network == "tcp" {
			_, own, _ = net.SplitHostPort(a.address)
		}
		if port > 0 {
			own = strconv.Itoa(port + s.rank)
		}
		if own != "" {
			all[s.rank] = zmqAddress{network: "tcp", address: net.JoinHostPort(host, own)}.String()
		}
	}
	return strings.Join(all, ",")
}

// namedBy tells whether the pod of a topic is this endpoint: its host:port, its name or its ID.
func namedBy(e *routing.Endpoint, pod []byte) bool {
	return len(pod) > 0 && (string(pod) == e.Name() || string(pod) == e.ID() || bytes.HasSuffix([]byte(e.URL()), append([]byte("://"), pod...)))
}
