// Package pgtest owns a real PostgreSQL for tests: one that they start, stop, pause and kill. It is imported by tests only.
//
// It refuses to run as root, as PostgreSQL does: then it runs as the user postgres, or nobody.
package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// Admin is the superuser; it needs no password on the Unix socket.
const Admin = "admin"

// Cluster is a PostgreSQL server with its data in a folder, on a Unix socket and a loopback port. On the port, passwords are
// asked for.
type Cluster struct {
	Socket string // the folder of the Unix socket
	Port   int    // on 127.0.0.1, and in the socket's name

	dir     string
	program func(name string) []string // how to run one of PostgreSQL's programs
	owner   *syscall.Credential        // nil: the one that we are
	cmd     *exec.Cmd                  // nil while it is down
	exited  chan struct{}              // closed when cmd has ended
}

var shared struct {
	sync.Mutex // guards what follows
	cluster    *Cluster
	databases  int
}

// Shared returns the cluster that all tests of a package share. TestMain must call Stop when they are done. Where there is no
// PostgreSQL the test is skipped, or fails when CI=true; under -short it is skipped.
func Shared(t testing.TB) *Cluster {
	t.Helper()
	program := find(t)
	shared.Lock()
	defer shared.Unlock()
	if shared.cluster == nil {
		c, err := newCluster(program)
		if err != nil {
			t.Fatal(err)
		}
		shared.cluster = c
	}
	return shared.cluster
}

// Stop ends the shared cluster, if there is one.
func Stop() {
	shared.Lock()
	defer shared.Unlock()
	if shared.cluster != nil {
		shared.cluster.remove()
		shared.cluster = nil
	}
}

// New returns a cluster of the test's own, which may be killed. It ends with the test.
func New(t testing.TB) *Cluster {
	t.Helper()
	c, err := newCluster(find(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.remove)
	return c
}

// find returns how PostgreSQL's programs are run: those of the pinned tool, or what the system has.
func find(t testing.TB) func(string) []string {
	t.Helper()
	if testing.Short() {
		t.Skip("starts PostgreSQL: not under -short")
	}
	tools := os.Getenv("CHANCERY_TOOLS")
	if _, file, _, ok := runtime.Caller(0); ok && tools == "" {
		tools = filepath.Join(filepath.Dir(file), "..", "..", "..", "..", ".tools")
	}
	wrapper := filepath.Join(tools, "postgresql")
	if _, err := os.Stat(wrapper); err == nil {
		return func(name string) []string { return []string{wrapper, name} }
	}
	dirs, _ := filepath.Glob("/usr/lib/postgresql/*/bin/initdb")
	slices.SortFunc(dirs, func(a, b string) int { return version(a) - version(b) })
	if in, err := exec.LookPath("initdb"); err == nil && len(dirs) == 0 {
		dirs = []string{in}
	}
	if len(dirs) > 0 {
		dir := filepath.Dir(dirs[len(dirs)-1])
		return func(name string) []string { return []string{filepath.Join(dir, name)} }
	}
	why := fmt.Sprintf("there is no PostgreSQL in %s or /usr/lib/postgresql; install it with test/tools/install.sh postgresql", tools)
	if os.Getenv("CI") == "true" {
		t.Fatal(why)
	}
	t.Skip(why)
	return nil
}

// version is that in /usr/lib/postgresql/VERSION/bin/initdb.
func version(path string) int {
	n, _ := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(path))))
	return n
}

// newCluster makes a cluster and starts it.
func newCluster(program func(string) []string) (c *Cluster, err error) {
	c = &Cluster{program: program}
	if c.dir, err = os.MkdirTemp("", "pg-"); err != nil { // not the test's folder: a socket's name has 107 bytes at most
		return nil, err
	}
	defer func() {
		if err != nil {
			c.remove()
		}
	}()
	c.Socket = c.dir
	if err := c.own(); err != nil {
		return nil, err
	}
	if out, err := c.command("initdb", "--pgdata", c.data(), "--username", Admin, "--auth", "trust", "--encoding", "UTF8", "--no-locale", "--no-sync", "--no-instructions").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("initdb: %w\n%s", err, out)
	}
	for name, text := range map[string]string{
		"postgresql.conf": "listen_addresses = '127.0.0.1'\nshared_buffers = 16MB\nmax_connections = 200\nwal_retrieve_retry_interval = 100\njit = off\ntimezone = UTC\nlog_line_prefix = '%m [%p] '\nunix_socket_directories = '" + c.Socket + "'\n",
		"pg_hba.conf":     "local all all trust\nlocal replication all trust\nhost all all 127.0.0.1/32 scram-sha-256\n",
	} {
		if err := os.WriteFile(filepath.Join(c.data(), name), []byte(text), 0o600); err != nil {
			return nil, err
		}
	}
	return c, c.startOnAnyPort()
}

// startOnAnyPort starts it on a port that nobody else has taken in the meantime.
func (c *Cluster) startOnAnyPort() (err error) {
	for range 5 {
		if c.Port, err = freePort(); err != nil {
			return err
		}
		if err = c.start(); err == nil || !strings.Contains(err.Error(), "Address already in use") {
			break
		}
	}
	return err
}

// Standby returns another cluster that follows this one, until it is promoted or the test ends.
func (c *Cluster) Standby(t testing.TB) *Cluster {
	t.Helper()
	s := &Cluster{program: c.program}
	var err error
	if s.dir, err = os.MkdirTemp("", "pg-"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.remove)
	s.Socket = s.dir
	if err := s.own(); err != nil {
		t.Fatal(err)
	}
	from := fmt.Sprintf("host=%s port=%d user=%s", c.Socket, c.Port, Admin)
	if out, err := s.command("pg_basebackup", "--pgdata", s.data(), "--write-recovery-conf", "--checkpoint=fast", "--no-sync", "--dbname", from).CombinedOutput(); err != nil {
		t.Fatalf("pg_basebackup: %v\n%s", err, out)
	}
	if err := s.write("standby.signal", ""); err != nil {
		t.Fatal(err)
	}
	if err := s.add("postgresql.conf", "unix_socket_directories = '"+s.Socket+"'\n"); err != nil {
		t.Fatal(err)
	}
	if err := s.startOnAnyPort(); err != nil {
		t.Fatal(err)
	}
	return s
}

// TLS makes it speak TLS on its port, as localhost (and not as 127.0.0.1), and returns the file of the CA.
func (c *Cluster) TLS(t testing.TB) string {
	t.Helper()
	ca, cert, key := certificate(t)
	if err := errors.Join(c.write("server.crt", cert), c.write("server.key", key), c.add("postgresql.conf", "ssl = on\n")); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "db-ca.pem")
	if err := os.WriteFile(file, []byte(ca), 0o644); err != nil {
		t.Fatal(err)
	}
	c.Reload(t, "ssl", "on")
	return file
}

// Reload makes it read its configuration again, and waits until a parameter has its new value.
func (c *Cluster) Reload(t testing.TB, parameter, value string) {
	t.Helper()
	c.Exec(t, "postgres", "SELECT pg_reload_conf()")
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		var now string
		conn := c.Connect(t, "postgres", Admin)
		err := conn.QueryRow(context.Background(), "SELECT current_setting($1)", parameter).Scan(&now)
		conn.Close(context.Background())
		if err == nil && now == value {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s is %q (%v), not %q", parameter, now, err, value)
		}
	}
}

// write writes a file of the cluster's, as its own.
func (c *Cluster) write(name, text string) error {
	path := filepath.Join(c.data(), name)
	err := os.WriteFile(path, []byte(text), 0o600)
	if err == nil && c.owner != nil {
		err = os.Chown(path, int(c.owner.Uid), int(c.owner.Gid))
	}
	return err
}

// add adds to a file of the cluster's; what is said last counts.
func (c *Cluster) add(name, text string) error {
	f, err := os.OpenFile(filepath.Join(c.data(), name), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

func (c *Cluster) data() string { return filepath.Join(c.dir, "data") }
func (c *Cluster) log() string  { return filepath.Join(c.dir, "log") }

// own gives the folder to the user that PostgreSQL runs as.
func (c *Cluster) own() error {
	if os.Geteuid() != 0 {
		return nil
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		if u, err = user.Lookup("nobody"); err != nil {
			return fmt.Errorf("PostgreSQL refuses to run as root: %w", err)
		}
	}
	uid, err := strconv.Atoi(u.Uid)
	if err != nil {
		return err
	}
	gid, err := strconv.Atoi(u.Gid)
	if err != nil {
		return err
	}
	c.owner = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid), NoSetGroups: false}
	return os.Chown(c.dir, uid, gid)
}

func (c *Cluster) command(name string, args ...string) *exec.Cmd {
	line := append(c.program(name), args...)
	cmd := exec.Command(line[0], line[1:]...)
	cmd.Dir = c.dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "HOME=" + c.dir}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: c.owner}
	return cmd
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// Start starts it again, after Shutdown or Kill.
func (c *Cluster) Start(t testing.TB) {
	t.Helper()
	if err := c.start(); err != nil {
		t.Fatal(err)
	}
}

func (c *Cluster) start() error {
	log, err := os.OpenFile(c.log(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := c.command("postgres", "-D", c.data(), "-p", strconv.Itoa(c.Port))
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr.Pdeathsig = syscall.SIGQUIT // at once, with its children
	if err := cmd.Start(); err != nil {
		return err
	}
	c.cmd, c.exited = cmd, make(chan struct{})
	go func() {
		cmd.Wait()
		close(c.exited)
	}()
	for deadline := time.Now().Add(60 * time.Second); ; {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		conn, err := pgx.Connect(ctx, c.URL("postgres", Admin))
		if err == nil {
			conn.Close(ctx)
		}
		if cancel(); err == nil {
			return nil
		}
		select {
		case <-c.exited:
			c.cmd = nil
		case <-time.After(20 * time.Millisecond):
			if time.Now().Before(deadline) {
				continue
			}
			c.kill()
		}
		text, _ := os.ReadFile(c.log())
		return fmt.Errorf("PostgreSQL does not start: %w\n%s", err, text)
	}
}

// URL returns that of a database on the Unix socket, where no role needs a password.
func (c *Cluster) URL(database, role string) string {
	return (&url.URL{Scheme: "postgres", User: url.User(role), Path: "/" + database,
		RawQuery: url.Values{"host": {c.Socket}, "port": {strconv.Itoa(c.Port)}}.Encode()}).String()
}

// SocketFile returns the file of the Unix socket.
func (c *Cluster) SocketFile() string {
	return filepath.Join(c.Socket, ".s.PGSQL."+strconv.Itoa(c.Port))
}

// Database makes an empty database and returns its name.
func (c *Cluster) Database(t testing.TB) string {
	t.Helper()
	shared.Lock()
	shared.databases++
	name := fmt.Sprintf("test%d", shared.databases)
	shared.Unlock()
	c.Exec(t, "postgres", "CREATE DATABASE "+name)
	return name
}

// Exec runs statements as the superuser, each by itself.
func (c *Cluster) Exec(t testing.TB, database string, statements ...string) {
	t.Helper()
	conn := c.Connect(t, database, Admin)
	defer conn.Close(context.Background())
	for _, s := range statements {
		if _, err := conn.Exec(context.Background(), s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

// Connect makes a connection on the Unix socket, which its caller closes.
func (c *Cluster) Connect(t testing.TB, database, role string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(context.Background(), c.URL(database, role))
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

// Shutdown stops it, as pg_ctl does: smart (waits for clients), fast (ends their connections) or immediate.
func (c *Cluster) Shutdown(t testing.TB, mode string) {
	t.Helper()
	sig, ok := map[string]syscall.Signal{"smart": syscall.SIGTERM, "fast": syscall.SIGINT, "immediate": syscall.SIGQUIT}[mode]
	if !ok || c.cmd == nil {
		t.Fatalf("shutting down, mode %q, of what runs: %t", mode, c.cmd != nil)
	}
	c.cmd.Process.Signal(sig)
	select {
	case <-c.exited:
		c.cmd = nil
	case <-time.After(60 * time.Second):
		t.Fatal("PostgreSQL does not stop")
	}
}

// Kill ends all its processes by SIGKILL, as if the machine had failed, with the disk's cache kept.
func (c *Cluster) Kill() { c.kill() }

func (c *Cluster) kill() {
	if c.cmd == nil {
		return
	}
	all := c.stop()
	for _, pid := range all[1:] { // its children first: left alone, they would hold the shared memory for a moment
		syscall.Kill(pid, syscall.SIGKILL)
	}
	for _, pid := range all[1:] {
		for alive(pid) {
			time.Sleep(time.Millisecond)
		}
	}
	syscall.Kill(all[0], syscall.SIGKILL)
	<-c.exited
	c.cmd = nil
}

// Pause stops all its processes where they are (SIGSTOP), until Resume.
func (c *Cluster) Pause() { c.stop() }

// Resume lets them go on.
func (c *Cluster) Resume() {
	for _, pid := range c.processes() {
		syscall.Kill(pid, syscall.SIGCONT)
	}
}

// stop stops all its processes, the one that makes them first, and returns them.
func (c *Cluster) stop() []int {
	syscall.Kill(c.cmd.Process.Pid, syscall.SIGSTOP)
	all := c.processes()
	for _, pid := range all {
		syscall.Kill(pid, syscall.SIGSTOP)
	}
	return all
}

// processes returns those of the cluster: the first and its children, which have no children.
func (c *Cluster) processes() []int {
	all := []int{c.cmd.Process.Pid}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range stats {
		if f := stat(file); len(f) > 1 && f[1] == strconv.Itoa(all[0]) {
			if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
				all = append(all, pid)
			}
		}
	}
	return all
}

// stat returns what a process is after its name: state, parent, and more; nothing if it has ended.
func stat(file string) []string {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil
	}
	_, rest, _ := strings.Cut(string(data), ") ")
	return strings.Fields(rest)
}

// alive says whether a process runs. One that waits for its parent to hear of its end does not.
func alive(pid int) bool {
	f := stat(fmt.Sprintf("/proc/%d/stat", pid))
	return len(f) > 0 && f[0] != "Z" && f[0] != "X"
}

// Log returns what it has logged.
func (c *Cluster) Log(t testing.TB) string {
	t.Helper()
	data, err := os.ReadFile(c.log())
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// remove ends it and removes its folder.
func (c *Cluster) remove() {
	c.kill()
	os.RemoveAll(c.dir)
}
