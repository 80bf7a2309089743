package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"kvgate/configs"
	"kvgate/routing"
)

func newServeCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serve (the default)",
		Example: "  kvgate serve --replica http://127.0.0.1:8000 --replica http://127.0.0.1:8001\n" +
			"  kvgate serve --config /etc/kvgate/config.yaml",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			load := func() (*configs.Loaded, error) { return loadSettings(cmd.Flags()) }
			return serve(cmd.Context(), load)
		},
	}
	configs.BindFlags(cmd.Flags())
	return cmd
}

// newLogger builds the process log on standard error. Under the journal a
// console line carries no time of its own.
func newLogger(l configs.Log, file *os.File, getenv func(string) string) (*zap.Logger, zap.AtomicLevel, error) {
	level, err := zap.ParseAtomicLevel(l.Level)
	if err != nil {
		return nil, level, fmt.Errorf("log.level: %w", err)
	}
	cfg := zap.NewProductionEncoderConfig()
	cfg.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	cfg.EncodeDuration = zapcore.SecondsDurationEncoder
	encoder := zapcore.NewJSONEncoder(cfg)
	terminal := isTerminal(file)
	if l.Format == "console" || l.Format == "auto" && terminal {
		cfg.EncodeLevel = zapcore.CapitalLevelEncoder
		if terminal && getenv("NO_COLOR") == "" {
			cfg.EncodeLevel = zapcore.CapitalColorLevelEncoder
		}
		cfg.EncodeTime = zapcore.TimeEncoderOfLayout("15:04:05.000")
		if underJournal(getenv, file) {
			cfg.TimeKey = zapcore.OmitKey
		}
		encoder = zapcore.NewConsoleEncoder(cfg)
	}
	return zap.New(zapcore.NewCore(encoder, zapcore.Lock(file), level)), level, nil
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// serve runs the gateway until a signal ends it.
func serve(ctx context.Context, load func() (*configs.Loaded, error)) error {
	first, err := load()
	if err != nil {
		return err
	}
	log, level, err := newLogger(first.Settings.Log, os.Stderr, os.Getenv)
	if err != nil {
		return err
	}
	defer func() { _ = log.Sync() }()
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGHUP, syscall.SIGTERM, syscall.SIGINT)
	defer signal.Stop(signals)

	g, err := newGateway(load, log, level)
	if err != nil {
		return err
	}
	checkFileLimit(log)
	g.start(ctx)
	systemd := newNotifier(os.Getenv)
	tell := func(err error) {
		if err != nil {
			log.Warn("systemd", zap.Error(err))
		}
	}
	log.Info("kvgate serves", zap.String("version", version()), zap.Stringer("listen", g.data.Addr()), zap.String("admin", g.settings.AdminListen),
		zap.Int("replicas", len(g.fleet.Endpoints())), zap.String("profile", g.router.Load().Profile()))

	background, cancel := context.WithCancel(ctx)
	defer cancel()
	g.serving.Go(func() {
		wait, done := context.WithTimeout(background, 30*time.Second)
		defer done()
		_ = g.scraper.WaitFirst(wait) // ready either way: a replica that is down must not hold up the start
		if background.Err() == nil {  // not after STOPPING
			tell(systemd.send("READY=1", g.status()))
		}
	})
	g.serving.Go(func() { g.watchdog(background, systemd) })

	for {
		select {
		case err := <-g.failed:
			cancel()
			return err
		case <-ctx.Done():
			return g.drain(cancel, systemd, signals)
		case s := <-signals:
			if s != syscall.SIGHUP {
				log.Info("draining", zap.Stringer("signal", s), zap.Int("in_flight", g.server.InFlight()))
				return g.drain(cancel, systemd, signals)
			}
			tell(systemd.reloading())
			_ = g.reload() // logged and counted there
			tell(systemd.send("READY=1", g.status()))
		}
	}
}

// drain ends the gateway: not ready for drain.delay, then no new connections
// and up to drain.timeout for the streams. A second signal ends it at once.
func (g *gateway) drain(cancel func(), systemd notifier, signals <-chan os.Signal) error {
	cancel()
	_ = systemd.send("STOPPING=1", g.status())
	g.draining.Store(true)
	g.server.Leave()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	finished := make(chan struct{})
	defer close(finished)
	go func() {
		select {
		case <-signals:
			stop()
		case <-finished:
		}
	}()
	select {
	case <-time.After(g.settings.Drain.Delay):
	case <-ctx.Done():
	}
	deadline, done := context.WithTimeout(ctx, g.settings.Drain.Timeout)
	defer done()
	err := g.stop(deadline)
	if err != nil {
		g.log.Warn("streams were cut", zap.Error(err))
	}
	g.log.Info("stopped")
	return nil
}

func (g *gateway) status() string {
	ready := 0
	all := g.fleet.Endpoints()
	for _, e := range all {
		if g.fleet.State(e) == routing.Ready {
			ready++
		}
	}
	return fmt.Sprintf("STATUS=%d/%d replicas ready, %d in flight", ready, len(all), g.server.InFlight())
}

// watchdog pings systemd while the data listener answers and the fleet's lock
// can be taken, so that a deadlock ends in a restart.
func (g *gateway) watchdog(ctx context.Context, systemd notifier) {
	every := watchdogInterval(os.Getenv, os.Getpid())
	if every == 0 {
		return
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if err := probe(ctx, g.dataURL(), every); err != nil {
			g.log.Error("the data listener does not answer its own probe", zap.Error(err))
			continue
		}
		g.fleet.IndexStats()
		_ = systemd.send("WATCHDOG=1", g.status())
	}
}

// probe asks a data listener for a sign of life: /livez, or over TLS the
// handshake, as it may ask for a certificate that only clients have.
func probe(ctx context.Context, url string, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if address, secure := strings.CutPrefix(url, "https://"); secure {
		alive := false
		dialer := tls.Dialer{Config: &tls.Config{
			InsecureSkipVerify: true, // #nosec G402 -- nothing is sent, and whose certificate it is does not matter
			VerifyConnection:   func(tls.ConnectionState) error { alive = true; return nil },
		}}
		conn, err := dialer.DialContext(ctx, "tcp", address)
		if err == nil {
			_ = conn.Close()
		}
		if alive {
			return nil
		}
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/livez", nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// checkFileLimit warns when descriptors will run out early: two per stream.
func checkFileLimit(log *zap.Logger) {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err == nil && limit.Cur < 8192 {
		log.Warn("few file descriptors: every stream takes two; raise the limit (LimitNOFILE in systemd, ulimit -n in a shell)", zap.Uint64("limit", limit.Cur))
	}
}
