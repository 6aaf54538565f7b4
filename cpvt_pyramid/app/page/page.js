'use strict';

const element = (id) => document.getElementById(id);
const picture = element('picture');

let about;
let chosen = null;  // {name, file} or {name, sample}
let running = new AbortController();  // the latest prediction; a new one replaces it

/** The JSON of an answer; an Error with the server's line if it is not one of success. */
async function ask(address, options) {
  let response;
  try {
    response = await fetch(address, options);
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Error('the server does not answer');
  }
  if (response.status === 503) throw new Error('the server is busy; try again in a moment');
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

function say(place, text, wrong = false) {
  element(place).textContent = text;
  element(place).classList.toggle('wrong', wrong);
}

function list(parent, kind, texts) {
  parent.replaceChildren(...texts.map((text) => {
    const child = document.createElement(kind);
    child.textContent = text;
    return child;
  }));
}

function showResult(answer) {
  list(element('warnings'), 'li', answer.warnings);
  picture.src = answer.picture;
  picture.alt = answer.summary;
  element('save').href = answer.picture;
  element('save').download = `${chosen.name.replace(/\.[^.]*$/, '')}.overlay.jpg`;
  picture.hidden = element('save').hidden = false;
}

function hideResult() {
  list(element('warnings'), 'li', []);
  picture.hidden = element('save').hidden = true;
}

/** Say each second how far a prediction is, until the returned function is called. */
function showProgress(name) {
  const start = Date.now();
  let isOver = false;
  const timer = setInterval(async () => {
    const seconds = Math.round((Date.now() - start) / 1000);
    let done = `${seconds} s`;
    try {
      const now = await ask('progress');
      if (now.tiles) done += `, ${now.done} of ${now.tiles} tiles`;
    } catch (error) {
      // The prediction itself tells that the server does not answer.
    }
    if (!isOver) say('status', `${name}: ${done}`);
  }, 1000);
  return () => {
    isOver = true;
    clearInterval(timer);
  };
}

async function predict() {
  if (!chosen) return;
  running.abort();
  const mine = running = new AbortController();
  const parameters = new URLSearchParams();
  if (element('size').dataset.given) parameters.set('shorter_side', element('size').value);
  if (about.score_thr !== null) parameters.set('score_thr', element('score').value);
  if (chosen.sample !== undefined) parameters.set('sample', chosen.sample);
  say('status', `${chosen.name}: ...`);
  element('result').classList.add('busy');
  const endProgress = showProgress(chosen.name);
  try {
    if (chosen.file && chosen.file.size > about.upload_bytes) {
      throw new Error(`an image file may have up to ${about.upload_bytes >> 20} MB`);
    }
    const options = {method: 'POST', body: chosen.file, signal: mine.signal};
    const answer = await ask(`predict?${parameters}`, options);
    endProgress();
    say('status', `${chosen.name}: ${answer.summary}`);
    showResult(answer);
  } catch (error) {
    endProgress();
    if (error.name === 'AbortError') return;
    say('status', `${chosen.name}: ${error.message}`, true);
    hideResult();
  }
  if (mine === running) element('result').classList.remove('busy');
}

function choose(image, preview) {
  chosen = image;
  element('preview').src = preview;
  element('preview').hidden = false;
  element('hint').textContent = image.name;
  for (const [index, button] of [...element('samples').children].entries()) {
    button.setAttribute('aria-pressed', index === image.sample);
  }
  predict();
}

function chooseFile(files) {
  if (files.length !== 1) {
    say('status', files.length ? 'One image at a time.' : 'Drop a file; this was none.', true);
    return;
  }
  const [file] = files;
  choose({name: file.name, file}, URL.createObjectURL(file));
}

function showValues() {
  const given = element('size').dataset.given || about.shorter_side !== null;
  element('size-value').textContent = given ? `${element('size').value} pixels` : 'unscaled';
  element('score-value').textContent = Number(element('score').value).toFixed(2);
}

function showAbout() {
  const classes = about.classes.length === 1 ? '1 class' : `${about.classes.length} classes`;
  document.title = element('name').textContent = about.name;
  element('about').textContent = [about.arch, about.task, classes].filter(Boolean).join(', ');
  element('about').title = about.classes.join(', ');
  [element('size').min, element('size').max] = about.sizes;
  element('size').value = about.shorter_side ?? 512;
  element('score').min = about.least_score;
  element('score').value = about.score_thr ?? 0;
  element('score-option').hidden = about.score_thr === null;
  showValues();
  for (const [sample, name] of about.samples.entries()) {
    const button = document.createElement('button');
    const image = document.createElement('img');
    const small = `samples/${sample}`;
    button.type = 'button';
    button.title = image.alt = name;
    image.src = small;
    button.append(image);
    button.addEventListener('click', () => choose({name, sample}, small));
    element('samples').append(button);
  }
}

function listen() {
  element('file').addEventListener('change', (event) => {
    if (event.target.files.length) chooseFile(event.target.files);
    event.target.value = '';  // so that the same file can be chosen again
  });
  document.addEventListener('dragover', (event) => {
    event.preventDefault();
    element('drop').classList.add('over');
  });
  document.addEventListener('dragleave', () => element('drop').classList.remove('over'));
  document.addEventListener('drop', (event) => {
    event.preventDefault();
    element('drop').classList.remove('over');
    chooseFile(event.dataTransfer.files);
  });
  document.addEventListener('paste', (event) => {
    if (event.clipboardData.files.length) chooseFile(event.clipboardData.files);
  });
  // Not every image that the server reads can be shown by a browser.
  element('preview').addEventListener('error', () => { element('preview').hidden = true; });
  element('preview').addEventListener('load', () => URL.revokeObjectURL(element('preview').src));
  element('size').addEventListener('input', () => { element('size').dataset.given = 'yes'; });
  for (const slider of [element('size'), element('score')]) {
    slider.addEventListener('input', showValues);
    slider.addEventListener('change', predict);
  }
}

async function start() {
  try {
    about = await ask('about');
  } catch (error) {
    say('status', error.message, true);
    return;
  }
  showAbout();
  listen();
}

start();
